# id: CR-06
# title: the key of the authority, and how far it is trusted
# expect: V no key; an authority for this sandbox alone, with a short life
# timeout: 60
# needs: internet credential
# escaped: ^(KEY|SAME|LONG|DEEP)
# safe: ^authority
# safe: ^done

# The hosts' own files with snake oil keys are what every user of the machine may read.
find /run /tmp /var/run /etc/ssl /home "$HOME" -maxdepth 4 -type f -size -1M -exec grep -lsa 'PRIVATE KEY-----' {} + 2>/dev/null | grep -v -e /ssl-cert-snakeoil -e "$HOME/go/" | sed 's/^/KEY /'
openssl s_client -connect api.bound.test:443 -servername api.bound.test -showcerts </dev/null 2>/dev/null >/tmp/chain
csplit -sz -f /tmp/cert- /tmp/chain '/-----BEGIN CERTIFICATE-----/' '{*}'
for c in /tmp/cert-*; do
	openssl x509 -in "$c" -noout -subject -issuer -enddate 2>/dev/null || continue
	openssl x509 -in "$c" -noout -checkend $((8 * 24 * 3600)) >/dev/null && echo "LONG $c"
done
# The authority itself is the last in what programs are told to trust.
python3 - <<'P'
import os, re, subprocess
text = open(os.environ["SSL_CERT_FILE"]).read()
issuer = subprocess.run("openssl x509 -in /tmp/cert-01 -noout -issuer -nameopt RFC2253 || openssl x509 -in /tmp/cert-00 -noout -issuer -nameopt RFC2253", shell=True, stdout=subprocess.PIPE, text=True).stdout.split("issuer=")[-1].strip()
for pem in re.findall("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", text, re.S)[-3:]:
    out = subprocess.run(["openssl", "x509", "-noout", "-subject", "-nameopt", "RFC2253", "-fingerprint", "-sha256", "-ext", "basicConstraints"], input=pem, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    if issuer and f"subject={issuer}" in out:
        print("authority", out)
        print("DEEP" if "pathlen:0" not in out else "leaves only")
        if os.environ.get("SIBLING_CA") and os.environ["SIBLING_CA"] in out: print("SAME")
P
echo done
