"""An agent of OpenAI's Agents SDK whose shell and files are a sandbox's.

    pip install 'openai-agents[e2b]'
    E2B_API_URL=http://127.0.0.1:7676 E2B_SANDBOX_URL=http://127.0.0.1:7676 E2B_API_KEY=e2b_... \
    OPENAI_API_KEY=sk-... python openai_agent.py

The key of the model stays here: the sandbox has neither it nor a network.
"""

import asyncio
import os

from agents import RunConfig, Runner, set_tracing_disabled
from agents.extensions.sandbox import E2BSandboxClient, E2BSandboxClientOptions
from agents.sandbox import Manifest, SandboxAgent, SandboxRunConfig
from agents.sandbox.capabilities import Shell
from agents.sandbox.entries import File

PROJECT = Manifest(entries={
    "calc.py": File(content=b"def add(a, b):\n    return a - b\n"),
    "test_calc.py": File(content=b"from calc import add\n\nassert add(2, 3) == 5, add(2, 3)\nprint('ok')\n"),
})


async def main():
    set_tracing_disabled(True)  # traces would go to OpenAI
    agent = SandboxAgent(
        name="mechanic",
        model=os.environ.get("OPENAI_MODEL", "gpt-5"),
        instructions="Find out why `python3 test_calc.py` fails, mend it, and say in one sentence what it was.",
        capabilities=[Shell()],
    )
    sandbox = SandboxRunConfig(
        client=E2BSandboxClient(),
        options=E2BSandboxClientOptions("e2b", timeout=300, allow_internet_access=False),
        manifest=PROJECT,
    )
    result = await Runner.run(agent, "Mend the project.", run_config=RunConfig(sandbox=sandbox))
    print(result.final_output)


asyncio.run(main())
