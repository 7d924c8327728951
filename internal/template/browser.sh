# A browser that crashed or was closed is followed by a new one.
while :; do
  chromium --headless --remote-debugging-port=9223 --user-data-dir="$HOME/.browser" about:blank
  sleep 0.2
done &
exec /usr/sbin/nginx -c /etc/nginx/devtools.conf
