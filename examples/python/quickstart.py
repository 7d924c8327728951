"""The official E2B SDK, unchanged, against a Berm server.

Set E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY first.
"""

from e2b import Sandbox

with Sandbox.create(timeout=60) as sandbox:
    print("created", sandbox.sandbox_id)
    print(sandbox.commands.run('echo "hello from $(whoami) on $(uname -s)"').stdout.strip())

    sandbox.files.write("data.csv", "city,population\nBern,134000\nBasel,173000\n")
    total = sandbox.commands.run("awk -F, 'NR > 1 { sum += $2 } END { print sum }' data.csv")
    print("total", total.stdout.strip())

    sandbox.commands.run("tr a-z A-Z < data.csv > upper.csv")
    print("read back", sandbox.files.read("upper.csv").splitlines()[1])
print("killed")
