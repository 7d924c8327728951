// Start commands at a level that saves memory: they begin once, and sandboxes go on from there.
import assert from 'node:assert/strict'
import { after, test } from 'node:test'

import { Sandbox, Template, waitForPort } from 'e2b'

const name = 'e2e-begun'
const headers = { 'X-API-Key': process.env.E2B_API_KEY }
const made = []

after(async () => {
  for (const sandbox of made) await sandbox.kill()
  await fetch(`${process.env.E2B_API_URL}/templates/${name}`, { method: 'DELETE', headers })
})

// A server that keeps a number of its own in memory, and counts.
const server = `python3 -c '
import http.server, secrets
token, n = secrets.token_hex(8), 0
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global n
        n += 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{token} {n}".encode())
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
'`

async function create(options = {}) {
  const begin = Date.now()
  const sandbox = await Sandbox.create(name, { timeoutMs: 120_000, ...options })
  made.push(sandbox)
  const took = Date.now() - begin
  const { berm } = await (await fetch(`${process.env.E2B_API_URL}/sandboxes/${sandbox.sandboxId}`, { headers })).json()
  const ask = async () => (await sandbox.commands.run('curl -sf http://127.0.0.1:8000/')).stdout.split(' ')
  return { sandbox, ask, took, begun: berm.begun ?? false }
}

test('sandboxes go on from where the build was', async (t) => {
  await Template.build(Template().fromBaseImage().setStartCmd(server, waitForPort(8000)), name, { cpuCount: 1, memoryMB: 512 })
  const [a, b] = [await create(), await create()]
  t.diagnostic(`created in ${a.took} and ${b.took} ms`)
  assert.deepEqual([a.begun, b.begun], [true, true])
  const [tokenA, first] = await a.ask()
  assert.equal(first, '1')
  assert.deepEqual(await a.ask(), [tokenA, '2'])
  assert.deepEqual(await b.ask(), [tokenA, '1'], 'the same process, which went on by itself')

  // Each is itself: names, ids and tokens are its own.
  const who = async ({ sandbox }) => (await sandbox.commands.run('hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id; echo $E2B_SANDBOX_ID')).stdout.trim().split('\n')
  const [whoA, whoB] = [await who(a), await who(b)]
  for (let i = 0; i < 4; i++) assert.notEqual(whoA[i], whoB[i])
  assert.equal(whoA[3], a.sandbox.sandboxId)

  // Variables of its own are for what comes, not for what has begun.
  const c = await create({ envs: { MINE: '1' } })
  assert.equal(c.begun, true)
  assert.equal((await c.ask())[0], tokenA)
  assert.equal((await c.sandbox.commands.run('echo $MINE')).stdout, '1\n')
})
