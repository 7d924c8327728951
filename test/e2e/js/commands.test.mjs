// The official JavaScript SDK against a running server: commands and terminals.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { CommandExitError, Sandbox, TimeoutError } from 'e2b'

let sandbox
before(async () => { sandbox = await Sandbox.create({ timeoutMs: 300_000 }) })
after(() => sandbox?.kill())

const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms))

test('output, error output and exit code are exact', async () => {
  const ok = await sandbox.commands.run('printf "a\\nb"; printf err >&2')
  assert.deepEqual([ok.stdout, ok.stderr, ok.exitCode], ['a\nb', 'err', 0])
  await assert.rejects(sandbox.commands.run('echo half; exit 7'), (error) => {
    assert.ok(error instanceof CommandExitError)
    assert.deepEqual([error.exitCode, error.stdout], [7, 'half\n'])
    return true
  })
  await assert.rejects(sandbox.commands.run('no-such-program'), { exitCode: 127 })
})

test('user, directory and environment of a command', async () => {
  assert.equal((await sandbox.commands.run('whoami; pwd')).stdout, 'user\n/home/user\n')
  assert.equal((await sandbox.commands.run('whoami', { user: 'root' })).stdout, 'root\n')
  assert.equal((await sandbox.commands.run('pwd', { cwd: '/tmp' })).stdout, '/tmp\n')
  assert.equal((await sandbox.commands.run('echo $X', { envs: { X: 'one' } })).stdout, 'one\n')
  assert.equal((await sandbox.commands.run('echo [$X]')).stdout, '[]\n')
  assert.equal((await sandbox.commands.run('sudo -n id -u')).stdout, '0\n')
  assert.equal((await sandbox.commands.run('echo $E2B_SANDBOX_ID')).stdout.trim(), sandbox.sandboxId)
  await assert.rejects(sandbox.commands.run('true', { cwd: '/nowhere' }), /nowhere/)
})

test('a deadline ends the command and what it started', async () => {
  const start = Date.now()
  await assert.rejects(sandbox.commands.run('sleep 77; echo late', { timeoutMs: 1_000 }), TimeoutError)
  assert.ok(Date.now() - start < 5_000)
})

test('output comes while the command runs', async () => {
  const times = []
  await sandbox.commands.run('echo one; sleep 1; echo two', { onStdout: () => times.push(Date.now()) })
  assert.equal(times.length, 2)
  assert.ok(times[1] - times[0] > 700)
})

test('standard input: sent in parts, closed, ended', async () => {
  const cat = await sandbox.commands.run('cat', { background: true, stdin: true })
  await sandbox.commands.sendStdin(cat.pid, 'first ')
  await sandbox.commands.sendStdin(cat.pid, 'second\n')
  await sandbox.commands.closeStdin(cat.pid)
  const result = await cat.wait()
  assert.deepEqual([result.stdout, result.exitCode], ['first second\n', 0])
})

test('background: list, reconnect, kill', async () => {
  const background = await sandbox.commands.run('for i in 1 2 3 4 5 6 7 8 9; do echo $i; sleep 0.3; done', { background: true })
  assert.ok((await sandbox.commands.list()).some((p) => p.pid === background.pid))
  await background.disconnect()
  const again = await sandbox.commands.connect(background.pid)
  const result = await again.wait()
  assert.match(result.stdout, /9\n$/)

  const sleep = await sandbox.commands.run('sleep 300', { background: true })
  assert.equal(await sandbox.commands.kill(sleep.pid), true)
  assert.equal(await sandbox.commands.kill(999_999), false)
  await assert.rejects(sleep.wait())
  await assert.rejects(sandbox.commands.run(`kill -0 ${sleep.pid}`))
})

test('a grandchild that holds the pipes does not hold the end', async () => {
  const start = Date.now()
  await sandbox.commands.run('(sleep 30 &) ; echo done', { timeoutMs: 20_000 })
  assert.ok(Date.now() - start < 10_000, 'waited for the grandchild')
})

test('a lot of output arrives whole', async () => {
  const { stdout } = await sandbox.commands.run('seq 1 400000', { timeoutMs: 60_000 })
  assert.equal(stdout.length, 2_688_895)
  assert.ok(stdout.endsWith('400000\n'))
  const text = (await sandbox.commands.run(`python3 -c "print('é漢😀' * 30000)"`)).stdout
  assert.equal(text, 'é漢😀'.repeat(30000) + '\n')
})

test('twenty commands at once', async () => {
  const results = await Promise.all(Array.from({ length: 20 }, (_, i) => sandbox.commands.run(`sleep 0.1; echo ${i}`)))
  assert.deepEqual(results.map((r) => r.stdout), Array.from({ length: 20 }, (_, i) => `${i}\n`))
})

test('terminal: size, input, resize, reconnect, end', async () => {
  let seen = ''
  const decoder = new TextDecoder()
  const terminal = await sandbox.pty.create({ cols: 90, rows: 30, onData: (data) => { seen += decoder.decode(data, { stream: true }) } })
  const type = (text) => sandbox.pty.sendInput(terminal.pid, new TextEncoder().encode(text))
  const until = async (pattern) => {
    for (let i = 0; i < 100 && !pattern.test(seen); i++) await wait(50)
    assert.match(seen, pattern)
  }
  await type('stty size; tty\n')
  await until(/30 90[\s\S]*\/dev\/pts\/\d/)
  await sandbox.pty.resize(terminal.pid, { cols: 101, rows: 41 })
  await type('stty size\n')
  await until(/41 101/)
  await type('sleep 100\n')
  await wait(500)
  await type('\x03')
  if (process.env.BERM_LEVEL !== 'gvisor') await until(/\^C/) // whose terminals do not show it
  await wait(500) // the terminal drops what is typed along with an interrupt
  await type('echo alive-$((6*7))\n')
  await until(/alive-42/)

  await terminal.disconnect()
  seen = ''
  const again = await sandbox.pty.connect(terminal.pid, { onData: (data) => { seen += decoder.decode(data, { stream: true }) } })
  await type('echo back-$((6*7)); exit\n')
  await until(/back-42/)
  assert.equal((await again.wait()).exitCode, 0)
})

test('terminal: kill', async () => {
  const terminal = await sandbox.pty.create({ cols: 80, rows: 24, onData: () => {} })
  assert.equal(await sandbox.pty.kill(terminal.pid), true)
  await assert.rejects(terminal.wait())
})
