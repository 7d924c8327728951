// The official JavaScript SDK against a running server: snapshots, forks, pauses without memory.
import assert from 'node:assert/strict'
import { after, test } from 'node:test'
import { Sandbox } from 'e2b'

const made = []
const keep = (sandbox) => (made.push(sandbox), sandbox)
after(() => Promise.all(made.map((s) => s.kill())))

const identity = 'hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id'
const lines = async (sandbox) => (await sandbox.commands.run(identity)).stdout.trim().split('\n')
const differ = (a, b) => a.forEach((line, i) => assert.notEqual(line, b[i]))

test('a snapshot has the files of its moment, and what begins with it an identity of its own', async () => {
  const sandbox = keep(await Sandbox.create({ timeoutMs: 60_000 }))
  await sandbox.files.write('/home/user/state', 'one')
  await sandbox.commands.run('echo "$PWD" >/tmp/where; rm -f ~/.bashrc; sudo touch /etc/made')
  const snapshot = await sandbox.createSnapshot()
  await sandbox.files.write('/home/user/state', 'two')
  const child = keep(await Sandbox.create(snapshot.snapshotId, { timeoutMs: 60_000, envs: { OWN: 'yes' } }))
  assert.equal(await child.files.read('/home/user/state'), 'one')
  assert.equal((await child.commands.run('echo $OWN; test -e /etc/made && test ! -e ~/.bashrc && echo kept')).stdout, 'yes\nkept\n')
  differ(await lines(sandbox), await lines(child))
  const found = await Sandbox.listSnapshots({ sandboxId: sandbox.sandboxId }).nextItems()
  assert.deepEqual(found.map((s) => s.snapshotId), [snapshot.snapshotId])
  await sandbox.kill()
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true)
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), false)
  assert.equal(await child.files.read('/home/user/state'), 'one')
})

test('forks diverge, and the source goes on', async () => {
  const sandbox = keep(await Sandbox.create({ timeoutMs: 60_000, envs: { INHERITED: 'yes' } }))
  await sandbox.files.write('/home/user/state', 'parent')
  const clock = await sandbox.commands.run('while true; do date +%s%N >/tmp/new; mv /tmp/new /tmp/clock; sleep 0.05; done', { background: true, timeoutMs: 0 })
  const forks = await sandbox.fork({ count: 5, timeoutMs: 60_000 })
  assert.equal(forks.length, 5)
  forks.forEach((fork) => (assert.ok(fork instanceof Sandbox, String(fork)), keep(fork)))
  const all = await Promise.all([sandbox, ...forks].map(lines))
  for (const part of [0, 1, 2]) assert.equal(new Set(all.map((one) => one[part])).size, 6)
  await Promise.all(forks.map((fork, i) => fork.files.write('/home/user/state', `child ${i}`)))
  assert.equal(await sandbox.files.read('/home/user/state'), 'parent')
  for (const [i, fork] of forks.entries()) {
    assert.equal((await fork.commands.run('echo $INHERITED; cat state')).stdout, `yes\nchild ${i}`)
  }
  const before = await sandbox.files.read('/tmp/clock')
  let after = before
  for (let i = 0; i < 100 && after === before; i++) {
    await new Promise((resolve) => setTimeout(resolve, 100))
    after = await sandbox.files.read('/tmp/clock')
  }
  assert.notEqual(after, before)
  await clock.kill()
})

test('a pause without memory keeps files, again and again', async () => {
  const sandbox = keep(await Sandbox.create({ timeoutMs: 60_000, envs: { KEPT: 'yes' } }))
  let boots = [(await lines(sandbox))[2]]
  for (let i = 0; i < 5; i++) {
    await sandbox.commands.run(`head -c ${100_000 * (i + 1)} /dev/urandom >data && sha256sum data >sum && echo ${i} >>log`)
    await sandbox.commands.run('sleep 600', { background: true })
    assert.equal(await sandbox.pause({ keepMemory: false }), true)
    assert.equal(await sandbox.isRunning(), false)
    await sandbox.connect()
    const out = await sandbox.commands.run('sha256sum -c sum && wc -l <log && echo $KEPT; pgrep -c sleep || true')
    assert.equal(out.stdout, `data: OK\n${i + 1}\nyes\n0\n`)
    boots.push((await lines(sandbox))[2])
  }
  assert.equal(new Set(boots).size, boots.length)
})
