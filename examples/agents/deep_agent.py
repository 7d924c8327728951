"""A LangChain deep agent whose files and shell are a sandbox's.

    pip install deepagents langchain-e2b langchain-openai
    E2B_API_URL=http://127.0.0.1:7676 E2B_SANDBOX_URL=http://127.0.0.1:7676 E2B_API_KEY=e2b_... \
    OPENAI_API_KEY=sk-... python deep_agent.py

The key of the model stays here: the sandbox has neither it nor a network.
"""

import os

from deepagents import create_deep_agent
from e2b import Sandbox
from langchain_e2b import E2BSandbox
from langchain_openai import ChatOpenAI

with Sandbox.create(timeout=300, allow_internet_access=False) as sandbox:
    sandbox.files.write("/home/user/sales.csv", "city,sold\nBern,3\nBasel,5\nBern,4\n")
    agent = create_deep_agent(
        model=ChatOpenAI(model=os.environ.get("OPENAI_MODEL", "gpt-5")),
        system_prompt="You work in /home/user with the tools that you have.",
        backend=E2BSandbox(sandbox=sandbox),
    )
    task = "Write a script, total.py, that prints what each city of sales.csv sold. Run it and tell the result."
    answer = agent.invoke({"messages": [{"role": "user", "content": task}]})
    print(answer["messages"][-1].content)
    print(sandbox.files.read("/home/user/total.py"))
