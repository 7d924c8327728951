"""A small script: run, its output as it comes, gone.

    pip install openai
    E2B_API_URL=http://127.0.0.1:7676 E2B_API_KEY=e2b_... python script.py
"""

import os

from openai import OpenAI, Stream

client = OpenAI(base_url=os.environ["E2B_API_URL"] + "/berm/v1", api_key=os.environ["E2B_API_KEY"])

code = """
words = "berm bank burrow tunnel".split()
for word in words:
    print(word)
sum(word.startswith("b") for word in words)
"""

container = client.containers.create(name="script", expires_after={"anchor": "last_active_at", "minutes": 1})
try:
    events = client.post(
        f"/containers/{container.id}/executions",
        body={"code": code, "stream": True, "timeout": 10},
        cast_to=object, stream=True, stream_cls=Stream[object],
    )
    for event in events:
        match event["type"]:
            case "stdout":
                print(event["text"], end="")
            case "result":
                print(event["text"], "words begin with b")
            case "error":
                raise SystemExit(event["traceback"])
            case "end_of_execution":
                assert event["status"] == "completed"
finally:
    client.containers.delete(container.id)
