# id: NW-02
# title: metadata services of clouds, by name and IPv6
# expect: D unknown names, asked of nobody
# timeout: 30
# needs: internet
# denied: metadata.google.internal not_listed
# denied: metadata.azure.internal not_listed
# escaped: ^GOT
# safe: ^done

for a in ("[fd00:ec2::254]", "[fd20:ce::254]", "[fe80::a9fe:a9fe%25eth0]", "metadata.google.internal", "metadata", "metadata.azure.internal", "instance-data"):
    outcome(a, web(f"http://{a}/"))
print("done")
