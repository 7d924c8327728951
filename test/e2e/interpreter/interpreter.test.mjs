// The code interpreter by the official JavaScript package, unchanged.
import { after, before, test } from 'node:test'
import assert from 'node:assert/strict'
import { Sandbox } from '@e2b/code-interpreter'

let sandbox
before(async () => { sandbox = await Sandbox.create({ timeoutMs: 600_000, envs: { FROM_SANDBOX: 'yes' } }) })
after(async () => { await sandbox?.kill() })

const stdout = (run) => run.logs.stdout.join('')

test('values, output and errors', async () => {
  const run = await sandbox.runCode('print("out")\nimport sys\nprint("err", file=sys.stderr)\n6 * 7')
  assert.equal(run.error, undefined)
  assert.equal(run.text, '42')
  assert.equal(stdout(run), 'out\n')
  assert.equal(run.logs.stderr.join(''), 'err\n')
  const failed = await sandbox.runCode('1 / 0')
  assert.equal(failed.error.name, 'ZeroDivisionError')
  assert.match(failed.error.traceback, /1 \/ 0/)
  assert.doesNotMatch(failed.error.traceback, /\x1b/)
})

test('a chart comes as a picture and as its data', async () => {
  const run = await sandbox.runCode(`
import matplotlib.pyplot as plt
plt.bar(['a', 'b'], [3, 5], label='sold')
plt.xlabel('Who'); plt.ylabel('Weight (kg)'); plt.title('Sales')
plt.show()`)
  const { png, chart } = run.results[0]
  assert.deepEqual([...Buffer.from(png, 'base64').subarray(0, 4)], [0x89, 0x50, 0x4e, 0x47])
  assert.deepEqual(chart, {
    type: 'bar', title: 'Sales', x_label: 'Who', y_label: 'Weight (kg)', x_unit: null, y_unit: 'kg',
    elements: [{ label: 'a', group: 'sold', value: 3 }, { label: 'b', group: 'sold', value: 5 }],
  })
})

test('tables come as data', async () => {
  const run = await sandbox.runCode(`
import pandas as pd
pd.DataFrame({'n': [1, 2], 'x': [0.5, float('nan')], 'at': pd.to_datetime(['2024-01-02', None])})`)
  assert.deepEqual(run.results[0].data, { n: [1, 2], x: [0.5, null], at: ['2024-01-02T00:00:00', null] })
  assert.match(run.results[0].html, /<table/)
})

test('languages', async () => {
  assert.equal((await sandbox.runCode('const n: number = 41; await Promise.resolve(n + 1)', { language: 'ts' })).text, '42')
  assert.equal(stdout(await sandbox.runCode("const fs = require('fs'); console.log(typeof fs.readFileSync)", { language: 'js' })), 'function\n')
  assert.equal(stdout(await sandbox.runCode('x=5; echo $((x * 2))', { language: 'bash' })), '10\n')
  assert.match((await sandbox.runCode('mean(c(1, 2, 6))', { language: 'r' })).results[0].text, /3/)
  assert.equal((await sandbox.runCode('int twice(int x) { return x * 2; }\ntwice(21)', { language: 'java' })).text, '42')
  const failed = await sandbox.runCode('throw new RuntimeException("no");', { language: 'java' })
  assert.equal(failed.error.name, 'RuntimeException')
  assert.equal(failed.error.traceback.split('\n')[0], 'java.lang.RuntimeException: no')
  await assert.rejects(sandbox.runCode('x', { language: 'cobol' }), /400/)
})

test('variables of the sandbox and of a call', async () => {
  const read = "import os; os.environ.get('FROM_SANDBOX'), os.environ.get('OF_CALL')"
  assert.equal((await sandbox.runCode(read, { envs: { OF_CALL: "it's" } })).text, `('yes', "it's")`)
  assert.equal((await sandbox.runCode(read)).text, "('yes', None)")
})

test('code runs as the ordinary user', async () => {
  assert.equal((await sandbox.runCode('import os; os.getuid()')).text, '1000')
})

test('contexts are apart, can be restarted and removed', async () => {
  await sandbox.runCode('apart = 1')
  const context = await sandbox.createCodeContext({ cwd: '/tmp' })
  assert.equal((await sandbox.runCode('apart', { context })).error.name, 'NameError')
  assert.equal((await sandbox.runCode('import os; apart = 2; os.getcwd()', { context })).text, '/tmp')
  await sandbox.restartCodeContext(context)
  assert.equal((await sandbox.runCode('apart', { context })).error.name, 'NameError')
  await sandbox.removeCodeContext(context)
  await assert.rejects(sandbox.runCode('1', { context }), /not found/)
  assert.equal((await sandbox.runCode('apart')).text, '1')
})

test('an endless loop ends with its client, and the next call works', async () => {
  await assert.rejects(sandbox.runCode('while True: pass', { timeoutMs: 2_000 }))
  assert.equal((await sandbox.runCode('1 + 1')).text, '2')
})

test('a dead kernel is told, and the next call works', async () => {
  const run = await sandbox.runCode('import os, signal; os.kill(os.getpid(), signal.SIGKILL)')
  assert.equal(run.error.name, 'ContextRestarting')
  assert.equal((await sandbox.runCode('1 + 1')).text, '2')
})

test('what takes all memory ends with an error, and the next call works', async () => {
  const own = await Sandbox.create({ timeoutMs: 300_000 })
  try {
    const run = await own.runCode('hog = []\nwhile True: hog.append(bytearray(b"x" * (64 << 20)))')
    assert.ok(['ContextRestarting', 'MemoryError'].includes(run.error?.name), JSON.stringify(run.error))
    assert.equal((await own.runCode('1 + 1')).text, '2')
  } catch (e) {
    // gVisor's memory is all in one process: the kernel may end that one, and so the sandbox.
    if (process.env.BERM_LEVEL !== 'gvisor' || !/was killed/.test(e.message)) throw e
  } finally {
    await own.kill()
  }
})

// The server, the shell that starts it, or both.
for (const [what, which] of [['server', '| tail -1'], ['shell', '| head -1'], ['server and a shell', '']]) {
  test(`a killed ${what} comes back`, async () => {
    await sandbox.commands.run(`kill -9 $(pgrep -f '[i]nterpreter/server.py' ${which})`)
    for (;;) {
      const code = await sandbox.commands.run('curl -s -o /dev/null -w "%{http_code}" http://127.0.0.1:49999/health || true')
      if (code.stdout === '200') break
      await new Promise((resolve) => setTimeout(resolve, 200))
    }
    assert.equal((await sandbox.runCode('1 + 1')).text, '2')
  })
}
