// Ports of a sandbox by host name, over TLS: needs E2B_DOMAIN, a trusted
// certificate and dns-hook.cjs.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { Sandbox } from 'e2b'

let sandbox
before(async () => { sandbox = await Sandbox.create({ timeoutMs: 300_000 }) })
after(() => sandbox?.kill())

const url = (port, path = '/') => `https://${sandbox.getHost(port)}${path}`

const server = `
import http.server, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.path == "/events":
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for i in range(3):
                data = f"data: {i}\\n\\n".encode()
                self.wfile.write(f"{len(data):x}\\r\\n".encode() + data + b"\\r\\n")
                self.wfile.flush()
                time.sleep(0.4)
            self.wfile.write(b"0\\r\\n\\r\\n")
            return
        body = f"{self.path} {self.headers['Host']} {self.headers.get('X-Forwarded-Proto')}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        size = 0
        if self.headers.get("Transfer-Encoding"):
            while (n := int(self.rfile.readline(), 16)):
                size += len(self.rfile.read(n)); self.rfile.readline()
        else:
            size = len(self.rfile.read(int(self.headers["Content-Length"])))
        body = str(size).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
`

test('a server inside, bound to its loopback, by host name', async () => {
  await sandbox.files.write('server.py', server)
  await sandbox.commands.run('python3 server.py 8000', { background: true, timeoutMs: 0 })
  const response = await fetch(url(8000, '/path?q=1'))
  assert.equal(response.status, 200)
  assert.equal(await response.text(), `/path?q=1 ${sandbox.getHost(8000)} https`)
})

test('a stream arrives piece by piece', async () => {
  const response = await fetch(url(8000, '/events'))
  const times = []
  for await (const _ of response.body) times.push(Date.now())
  assert.ok(times.length >= 3, `${times.length} pieces`)
  assert.ok(times.at(-1) - times[0] > 500, 'buffered')
})

test('a large body goes through', async () => {
  const response = await fetch(url(8000), { method: 'POST', body: new Uint8Array(16 << 20) })
  assert.equal(await response.text(), String(16 << 20))
})

test('what cannot be reached answers as the protocol says', async () => {
  const closed = await fetch(url(9999))
  assert.equal(closed.status, 502)
  assert.deepEqual(await closed.json(), {
    sandboxId: sandbox.sandboxId, message: 'The sandbox is running but port is not open', port: 9999, code: 502,
  })
  const unknown = await fetch(url(8000).replace(sandbox.sandboxId, 'i' + '0'.repeat(20)))
  assert.equal(unknown.status, 502)
  assert.equal((await unknown.json()).message, 'The sandbox was not found')
  const init = await fetch(url(49983, '/init'), { method: 'POST', body: '{}' })
  assert.equal(init.status, 404)
})

test('traffic can need a token', async () => {
  const closed = await Sandbox.create({ timeoutMs: 60_000, network: { allowPublicTraffic: false } })
  try {
    await closed.files.write('server.py', server)
    await closed.commands.run('python3 server.py 8000', { background: true, timeoutMs: 0 })
    const address = `https://${closed.getHost(8000)}/`
    assert.equal((await fetch(address)).status, 403)
    assert.equal((await fetch(address, { headers: { 'e2b-traffic-access-token': 'wrong' } })).status, 403)
    const allowed = await fetch(address, { headers: { 'e2b-traffic-access-token': closed.trafficAccessToken } })
    assert.equal(allowed.status, 200)
  } finally {
    await closed.kill()
  }
})

test('after a kill the host is gone', async () => {
  const short = await Sandbox.create({ timeoutMs: 60_000 })
  await short.kill()
  assert.equal((await fetch(`https://${short.getHost(8000)}/`)).status, 502)
})
