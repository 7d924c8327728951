// The official JavaScript SDK against a running server: life cycle, lists,
// limits of time, pause and resume.
import assert from 'node:assert/strict'
import { after, test } from 'node:test'
import { Sandbox, SandboxNotFoundError, TimeoutError, NotFoundError, AuthenticationError } from 'e2b'

const mark = 'e2e-' + Math.random().toString(36).slice(2)
const made = []
async function create(options = {}) {
  const sandbox = await Sandbox.create({ timeoutMs: 60_000, ...options, metadata: { mark, ...options.metadata } })
  made.push(sandbox)
  return sandbox
}
after(() => Promise.all(made.map((s) => s.kill())))

const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms))

test('create gives a usable sandbox with what was asked for', async () => {
  const sandbox = await create({ metadata: { 'k 1': 'v&2=é' }, envs: { GREETING: 'hello' } })
  assert.match(sandbox.sandboxId, /^i[a-z0-9]{20}$/)
  assert.equal((await sandbox.commands.run('echo $GREETING')).stdout, 'hello\n')
  assert.equal(await sandbox.isRunning(), true)
  const info = await sandbox.getInfo()
  assert.equal(info.sandboxId, sandbox.sandboxId)
  assert.equal(info.state, 'running')
  assert.equal(info.name, 'base')
  assert.deepEqual(info.metadata, { mark, 'k 1': 'v&2=é' })
  assert.ok(info.cpuCount >= 1 && info.memoryMB > 0)
  const lives = info.endAt - info.startedAt
  assert.ok(lives > 55_000 && lives < 65_000, `lives ${lives} ms`)
})

test('kill ends it, and a second kill finds nothing', async () => {
  const sandbox = await create()
  assert.equal(await sandbox.kill(), true)
  assert.equal(await sandbox.kill(), false)
  assert.equal(await sandbox.isRunning(), false)
  await assert.rejects(Sandbox.connect(sandbox.sandboxId), NotFoundError)
  await assert.rejects(sandbox.commands.run('true'))
})

test('an unknown template and a wrong key are refused', async () => {
  await assert.rejects(Sandbox.create('no-such-template'), /no-such-template/)
  await assert.rejects(Sandbox.create({ apiKey: 'e2b_' + 'f'.repeat(40) }), AuthenticationError)
})

test('list filters by metadata and state and pages without gaps', async () => {
  const page = { ['page' + mark]: 'yes' }
  const three = await Promise.all([1, 2, 3].map(() => create({ metadata: page })))
  const paginator = Sandbox.list({ query: { metadata: page }, limit: 1 })
  const seen = []
  for (let pages = 0; paginator.hasNext && pages < 10; pages++) {
    const items = await paginator.nextItems()
    assert.ok(items.length <= 1)
    seen.push(...items.map((item) => item.sandboxId))
  }
  assert.deepEqual(seen.toSorted(), three.map((s) => s.sandboxId).toSorted())

  await three[0].pause()
  const ids = async (state) =>
    (await Sandbox.list({ query: { metadata: page, state } }).nextItems()).map((item) => item.sandboxId)
  assert.deepEqual(await ids(['paused']), [three[0].sandboxId])
  assert.equal((await ids(['running'])).length, 2)
  assert.equal((await ids(['running', 'paused'])).length, 3)
})

test('a timeout ends it, and can be moved', async () => {
  const sandbox = await create({ timeoutMs: 1_000 })
  await sandbox.setTimeout(30_000)
  await wait(1_500)
  assert.equal(await sandbox.isRunning(), true)
  await sandbox.setTimeout(1_000)
  await wait(2_000)
  assert.equal(await sandbox.isRunning(), false)
  await assert.rejects(sandbox.getInfo(), SandboxNotFoundError)
})

test('connect only ever extends', async () => {
  const sandbox = await create({ timeoutMs: 60_000 })
  const before = (await sandbox.getInfo()).endAt.getTime()
  await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 10_000 })
  assert.equal((await sandbox.getInfo()).endAt.getTime(), before)
  const again = await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 120_000 })
  assert.ok((await again.getInfo()).endAt.getTime() > before + 30_000)
  assert.equal((await again.commands.run('echo same')).stdout, 'same\n')
})

test('pause keeps processes, memory and files; resume lets them go on', async () => {
  const sandbox = await create({ envs: { KEPT: 'env' } })
  await sandbox.files.write('kept', 'file')
  const counter = await sandbox.commands.run(
    'python3 -u -c "import os, time\nn = 0\nwhile True:\n    n += 1\n    open(\'next\', \'w\').write(str(n))\n    os.replace(\'next\', \'count\')\n    time.sleep(0.05)"',
    { background: true })
  await wait(500)
  assert.equal(await sandbox.pause(), true)
  assert.equal(await sandbox.pause(), false)
  assert.equal((await sandbox.getInfo()).state, 'paused')
  assert.equal(await sandbox.isRunning(), false)
  await wait(500)

  const resumed = await Sandbox.connect(sandbox.sandboxId)
  assert.equal(await resumed.files.read('kept'), 'file')
  assert.equal((await resumed.commands.run('echo $KEPT')).stdout, 'env\n')
  const count = Number(await resumed.files.read('count'))
  assert.ok(count >= 1 && count < 18, `counted to ${count}: it ran on while paused`)
  let later = count
  for (let tries = 0; tries < 50 && later <= count; tries++) {
    await wait(100)
    later = Number(await resumed.files.read('count'))
  }
  assert.ok(later > count, 'it does not run on')
  assert.ok((await resumed.commands.list()).some((process) => process.pid === counter.pid))
})

test('a timeout can pause instead of kill, and traffic wakes it', async () => {
  const sandbox = await create({ timeoutMs: 1_000, lifecycle: { onTimeout: 'pause', autoResume: true } })
  await sandbox.files.write('kept', 'yes')
  await wait(2_500)
  assert.equal((await sandbox.getInfo()).state, 'paused')
  assert.equal((await sandbox.commands.run('cat kept')).stdout, 'yes')
  assert.equal((await sandbox.getInfo()).state, 'running')
})

test('a sandbox killed during a command says so', async () => {
  const sandbox = await create()
  const sleeping = sandbox.commands.run('sleep 60')
  const failed = assert.rejects(sleeping, (error) => {
    assert.ok(error instanceof TimeoutError, `${error.constructor.name}: ${error.message}`)
    assert.match(error.message, /killed|end of life/)
    return true
  })
  await wait(500)
  await sandbox.kill()
  await failed
})

test('metrics have a first sample at once', async () => {
  const sandbox = await create()
  await sandbox.commands.run('head -c 50M /dev/zero >big')
  let metrics = []
  for (let i = 0; i < 40 && metrics.length === 0; i++) {
    metrics = await sandbox.getMetrics()
    if (metrics.length === 0) await wait(250)
  }
  assert.ok(metrics.length > 0)
  const last = metrics.at(-1)
  assert.ok(last.memTotal > 0 && last.memUsed > 0 && last.cpuCount >= 1 && last.diskTotal > 0, JSON.stringify(last))
})

test('sandboxes do not see each other', async () => {
  const [one, two] = await Promise.all([create(), create()])
  await one.files.write('/tmp/secret', 'of one')
  assert.equal(await two.files.exists('/tmp/secret'), false)
  const { stdout } = await two.commands.run('ps -e | wc -l')
  assert.ok(Number(stdout) < 15, `${stdout} processes`)
  // The token of one opens nothing in the other.
  const response = await fetch(`${process.env.E2B_SANDBOX_URL ?? `https://49983-${two.sandboxId}.${process.env.E2B_DOMAIN}`}/envs`, {
    headers: { 'E2b-Sandbox-Id': two.sandboxId, 'E2b-Sandbox-Port': '49983', 'X-Access-Token': one.envdAccessToken ?? 'none' },
  })
  assert.equal(response.status, 401)
})

test('ten at once', async () => {
  const ten = await Promise.all(Array.from({ length: 10 }, () => create()))
  assert.equal(new Set(ten.map((s) => s.sandboxId)).size, 10)
  const outs = await Promise.all(ten.map((s, i) => s.commands.run(`echo ${i}`)))
  assert.deepEqual(outs.map((o) => o.stdout.trim()), ten.map((_, i) => String(i)))
})
