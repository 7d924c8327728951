"""Exercises of students, judged in batch: a container for each, so that none can touch another's.

    pip install openai
    E2B_API_URL=http://127.0.0.1:7676 E2B_API_KEY=e2b_... python exercises.py
"""

import os
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

client = OpenAI(base_url=os.environ["E2B_API_URL"] + "/berm/v1", api_key=os.environ["E2B_API_KEY"])

# The exercise: add(a, b) returns the sum.
solutions = {
    "ann": "def add(a, b): return a + b",
    "ben": "def add(a, b): return a - b",
    "cleo": "def add(a, b):\n    while True: pass",
    "dan": "import shutil; shutil.rmtree('/home/user', ignore_errors=True)\ndef add(a, b): return a + b",
}
judge = """
for a, b in [(1, 2), (-3, 3), (0.5, 0.25)]:
    got = add(a, b)
    assert got == a + b, f"{got} is no sum"
"""


def grade(student):
    container = client.containers.create(name=student)
    try:
        answer = client.post(
            f"/containers/{container.id}/executions", cast_to=object,
            body={"code": solutions[student] + "\n" + judge, "timeout": 5},
        )
    finally:
        client.containers.delete(container.id)
    match answer["status"]:
        case "completed":
            return "passed"
        case "timed_out":
            return "not in time"
    return f"failed, {answer['error']['value']}"


with ThreadPoolExecutor(2) as several:
    for student, verdict in zip(solutions, several.map(grade, solutions)):
        print(f"{student}: {verdict}")
