// The official JavaScript SDK against a level that keeps memory.
import assert from 'node:assert/strict'
import { after, test } from 'node:test'
import { Sandbox } from 'e2b'

const made = []
const keep = (sandbox) => (made.push(sandbox), sandbox)
after(() => Promise.all(made.map((s) => s.kill())))

// A server that counts by itself and by requests, and whose timer rings once. All of it is in its
// memory.
const program = `
import http.server, json, os, secrets, socketserver, threading, time
state = {'ticks': 0, 'told': 0, 'rang': 0, 'token': secrets.token_hex(8), 'pid': os.getpid(), 'env': os.environ.get('KEPT')}
def tick():
    while True:
        time.sleep(0.02)
        state['ticks'] += 1
def ring(): state['rang'] += 1
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path != '/': state['told'] += int(self.path[1:])
        self.send_response(200); self.end_headers()
        self.wfile.write(json.dumps(dict(state, now=time.time(), random=os.urandom(8).hex())).encode())
    def log_message(self, *args): pass
threading.Thread(target=tick, daemon=True).start()
threading.Timer(SECONDS, ring).start()
socketserver.ThreadingMixIn.daemon_threads = True
http.server.ThreadingHTTPServer(('127.0.0.1', 8080), Handler).serve_forever()
`
const begin = async (sandbox, seconds) => {
  await sandbox.files.write('/home/user/count.py', program.replace('SECONDS', seconds))
  // With no stream of ours to it: its end would have the SDK look how the sandbox is, and wake it.
  await sandbox.commands.run('nohup python3 count.py >/dev/null 2>&1 </dev/null &')
}
const ask = async (sandbox, path = '/') => {
  const script = `for i in $(seq 100); do curl -sf localhost:8080${path} && break; sleep 0.1; done`
  return JSON.parse((await sandbox.commands.run(script)).stdout)
}
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms))
// goesOn checks that a program is the same one and does not stand still.
const goesOn = async (sandbox, before) => {
  const first = await ask(sandbox)
  await sleep(300)
  const now = await ask(sandbox)
  for (const kept of ['token', 'pid', 'env']) assert.equal(now[kept], before[kept])
  assert.ok(first.ticks >= before.ticks && now.ticks > first.ticks, `${before.ticks}, ${first.ticks}, ${now.ticks}`)
  assert.ok(Math.abs(now.now - Date.now() / 1000) < 30, `its clock says ${now.now}`)
  return now
}
const rings = async (sandbox) => {
  for (let i = 0; i < 100 && (await ask(sandbox)).rang === 0; i++) await sleep(100)
  assert.equal((await ask(sandbox)).rang, 1)
}
const identity = async (sandbox) =>
  (await sandbox.commands.run('hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id')).stdout.trim().split('\n')

test('a pause keeps processes, timers, servers, environment, and whatever they had in memory', async () => {
  const sandbox = keep(await Sandbox.create({ timeoutMs: 120_000, envs: { KEPT: 'yes' } }))
  await begin(sandbox, 3)
  let before = await ask(sandbox, '/7')
  const own = await identity(sandbox)
  for (let i = 0; i < 3; i++) {
    assert.equal(await sandbox.pause(), true)
    assert.equal(await sandbox.isRunning(), false)
    await sandbox.connect({ timeoutMs: 120_000 })
    before = await goesOn(sandbox, before)
    assert.equal(before.told, 7)
  }
  await rings(sandbox)
  assert.deepEqual(await identity(sandbox), own)
})

test('five forks go on and diverge, and so does the source', async () => {
  const sandbox = keep(await Sandbox.create({ timeoutMs: 120_000, envs: { KEPT: 'yes' } }))
  await begin(sandbox, 5)
  const before = await ask(sandbox, '/3')
  const forks = await sandbox.fork({ count: 5, timeoutMs: 120_000 })
  forks.forEach((fork) => (assert.ok(fork instanceof Sandbox, String(fork)), keep(fork)))
  const all = [sandbox, ...forks]
  await Promise.all(all.map((one, i) => ask(one, `/${100 * i}`)))
  const answers = await Promise.all(all.map((one) => goesOn(one, before)))
  assert.deepEqual(answers.map((a) => a.told), [3, 103, 203, 303, 403, 503])
  assert.equal(new Set(answers.map((a) => a.random)).size, 6)
  const ids = await Promise.all(all.map(identity))
  for (const part of [0, 1, 2]) assert.equal(new Set(ids.map((one) => one[part])).size, 6)
  await Promise.all(all.map(rings))
})

test('a snapshot goes on, with another environment for what begins then, any number of times', async () => {
  const sandbox = keep(await Sandbox.create({ timeoutMs: 120_000, envs: { KEPT: 'yes' } }))
  await begin(sandbox, 4)
  const before = await ask(sandbox, '/1')
  const snapshot = await sandbox.createSnapshot()
  await sandbox.kill()
  for (const name of ['one', 'two']) {
    const child = keep(await Sandbox.create(snapshot.snapshotId, { timeoutMs: 120_000, envs: { OWN: name } }))
    await goesOn(child, before)
    assert.equal((await child.commands.run('echo $OWN $KEPT')).stdout, `${name}\n`)
    await rings(child)
  }
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true)
})

test('auto-pause keeps memory, and traffic wakes it', async () => {
  const sandbox = keep(await Sandbox.create({ timeoutMs: 8_000, lifecycle: { onTimeout: 'pause', autoResume: true }, envs: { KEPT: 'yes' } }))
  await begin(sandbox, 6)
  const before = await ask(sandbox, '/5')
  for (let i = 0; i < 200 && (await sandbox.getInfo()).state !== 'paused'; i++) await sleep(100)
  assert.equal((await sandbox.getInfo()).state, 'paused')
  const now = await goesOn(sandbox, before)
  assert.equal(now.told, 5)
  await rings(sandbox)
})
