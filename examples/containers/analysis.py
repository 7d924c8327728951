"""Data analysis in a conversation: a file in, a table and a chart out.

    pip install openai
    E2B_API_URL=http://127.0.0.1:7676 E2B_API_KEY=e2b_... python analysis.py
"""

import base64
import os

from openai import OpenAI

client = OpenAI(base_url=os.environ["E2B_API_URL"] + "/berm/v1", api_key=os.environ["E2B_API_KEY"])
sales = b"region,month,sold\nnorth,1,30\nnorth,2,50\nsouth,1,20\nsouth,2,35\n"


def run(container, code):
    answer = client.post(f"/containers/{container.id}/executions", cast_to=object, body={"code": code})
    assert answer["error"] is None, answer["error"]["traceback"]
    return answer


# The same thread has the same container, in this process or in the next.
container = client.containers.create(name="sales", extra_body={"thread_id": "analysis"})
client.containers.files.create(container.id, file=("sales.csv", sales))

answer = run(container, """
import pandas as pd
sales = pd.read_csv("sales.csv")
sales.groupby("region").sold.sum().reset_index()
""")
table = answer["results"][0]["data"]  # by columns
print(dict(zip(table["region"], table["sold"])))

# A later turn of the conversation has the variables of the earlier one.
answer = run(container, """
import matplotlib.pyplot as plt
total = sales.groupby("region").sold.sum()
plt.bar(total.index, total.values)
plt.title("Sold by region")
plt.savefig("chart.pdf")
plt.show()
""")
figure = next(r for r in answer["results"] if "png" in r)
with open("chart.png", "wb") as f:
    f.write(base64.b64decode(figure["png"]))
bars = {bar["label"]: bar["value"] for bar in figure["chart"]["elements"]}
print(f"{max(bars, key=bars.get)} sells most: {figure['chart']['title']} {bars}")

# What code wrote is a file of the container.
made = {os.path.basename(f.path): f for f in client.containers.files.list(container.id)}
pdf = client.containers.files.content.retrieve(made["chart.pdf"].id, container_id=container.id).read()
assert pdf.startswith(b"%PDF") and made["chart.pdf"].source == "assistant" and made["sales.csv"].source == "user"

client.containers.delete(container.id)
