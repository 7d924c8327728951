# id: NW-12
# title: programs that ignore what they are told of proxies
# expect: D as with them: there is no proxy
# timeout: 30
# needs: internet
# denied: evil.test not_listed
# denied: 93.184.216.66 not_listed
# escaped: ^(GOT|X-Internet)
# safe: ^done

env -i /usr/bin/curl -sikm3 https://evil.test/
curl --noproxy '*' -sikm3 https://evil.test/
curl -sikm3 "https://$EVIL_IP/"
curl -sikm3 -x "http://$EVIL_IP:80" http://allowed.test/
curl -sikm3 --socks5-hostname "$EVIL_IP:443" http://allowed.test/
curl -sikm3 -x http://allowed.test:80 -p https://evil.test/
curl -sikm3 -x http://allowed.test:80 http://evil.test/
echo done
