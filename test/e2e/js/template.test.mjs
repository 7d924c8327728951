// Templates that the SDK builds: steps, files, cache, tags, failures.
import assert from 'node:assert/strict'
import fs from 'node:fs'
import os from 'node:os'
import path from 'node:path'
import { after, before, test } from 'node:test'

import { Sandbox, Template } from 'e2b'

let context
const built = new Set()

before(() => {
  context = fs.mkdtempSync(path.join(os.tmpdir(), 'berm-template-'))
  fs.mkdirSync(path.join(context, 'app/data'), { recursive: true })
  fs.writeFileSync(path.join(context, 'app/main.py'), 'print(open("data/words").read().strip())\n')
  fs.writeFileSync(path.join(context, 'app/data/words'), 'from the context\n')
  fs.symlinkSync('main.py', path.join(context, 'app/link.py'))
  fs.writeFileSync(path.join(context, 'tool.sh'), '#!/bin/sh\necho tool "$GREETING"\n')
})

after(async () => {
  fs.rmSync(context, { recursive: true, force: true })
  for (const name of built) await fetch(`${process.env.E2B_API_URL}/templates/${name}`, { method: 'DELETE', headers: { 'X-API-Key': process.env.E2B_API_KEY } })
})

// build builds and returns what was told of it.
async function build(template, name, options = {}) {
  built.add(name.split(':')[0])
  const log = []
  const info = await Template.build(template, name, { cpuCount: 1, memoryMB: 512, onBuildLogs: (l) => log.push(l.message), ...options })
  return { info, log: log.join('\n') }
}

async function inside(name, command, check) {
  const sandbox = await Sandbox.create(name, { timeoutMs: 60_000 })
  try {
    check(await sandbox.commands.run(command))
  } finally {
    await sandbox.kill()
  }
}

test('steps, files and defaults', async () => {
  const template = Template({ fileContextPath: context })
    .fromBaseImage()
    .setEnvs({ GREETING: 'hello' })
    .copy('app', 'app')
    .copy('tool.sh', '/usr/local/bin/tool', { user: 'root', mode: 0o755 })
    .runCmd('sudo rm /usr/bin/less && mkdir made && touch made/by-$(whoami)')
    .runCmd('mkdir -p /opt/thing && rm -rf /usr/share/doc/bash', { user: 'root' })
    .setWorkdir('/home/user/app')
    .runCmd('python3 link.py > out')
  const { log } = await build(template, 'e2e-steps')
  assert.match(log, /\[builder 1\/\d+\] ENV GREETING/)
  await inside('e2e-steps', 'pwd; whoami; cat out; tool; ls ../made; stat -c %U:%a /usr/local/bin/tool out; [ ! -e /usr/bin/less ] && [ ! -e /usr/share/doc/bash ] && [ -d /opt/thing ] && echo gone; readlink link.py', (r) => {
    assert.equal(r.stdout, '/home/user/app\nuser\nfrom the context\ntool hello\nby-user\nroot:755\nuser:644\ngone\nmain.py\n')
  })

  // Nothing has changed: nothing is done. One step has: it and what follows are.
  let again = await build(template, 'e2e-steps')
  assert.equal(again.log.match(/CACHED \[builder/g).length, 7)
  const now = Date.now() // never built before, also where this has run before
  const changed = Template({ fileContextPath: context })
    .fromBaseImage()
    .setEnvs({ GREETING: 'hello' })
    .copy('app', 'app')
    .copy('tool.sh', '/usr/local/bin/tool', { user: 'root', mode: 0o755 })
    .runCmd(`echo ${now} > file`)
    .runCmd('cat file')
  again = await build(changed, 'e2e-steps')
  assert.match(again.log, /CACHED \[builder 3\/5\]/)
  assert.doesNotMatch(again.log, /CACHED \[builder [45]\/5\]/)
  const forced = await build(changed, 'e2e-steps', { skipCache: true })
  assert.doesNotMatch(forced.log, /CACHED/)
})

test('a failure names its step', async () => {
  const failing = Template().fromBaseImage().runCmd('true').runCmd('echo why >&2; exit 7')
  await assert.rejects(build(failing, 'e2e-fails'), (err) => /failed to run command 'echo why >&2; exit 7': exit status 7/.test(err.message))
  await assert.rejects(build(Template().fromTemplate('e2e-none-such'), 'e2e-fails'), /'e2e-none-such' not found/)
  await assert.rejects(build(Template().fromBaseImage().runCmd('whoami', { user: 'nobody2' }), 'e2e-fails'),
    /failed to run command 'whoami': command failed: unauthenticated: invalid username: 'nobody2'/)
  assert.equal(await Template.exists('e2e-fails'), false)
})

test('tags and templates on templates', async () => {
  const { info } = await build(Template().fromBaseImage().runCmd('echo one > v'), 'e2e-tags:v1')
  await build(Template().fromTemplate('e2e-tags:v1').runCmd('echo two > v'), 'e2e-tags:v2')
  await inside('e2e-tags:v1', 'cat v', (r) => assert.equal(r.stdout, 'one\n'))
  await inside('e2e-tags:v2', 'cat v', (r) => assert.equal(r.stdout, 'two\n'))
  const assigned = await Template.assignTags('e2e-tags:v1', ['stable', 'default'])
  assert.equal(assigned.buildId, info.buildId)
  await inside('e2e-tags', 'cat v', (r) => assert.equal(r.stdout, 'one\n'))
  await Template.assignTags('e2e-tags:v2', 'stable')
  await inside('e2e-tags:stable', 'cat v', (r) => assert.equal(r.stdout, 'two\n'))
  const tags = await Template.getTags(info.templateId)
  assert.deepEqual(tags.map((t) => t.tag).sort(), ['default', 'stable', 'v1', 'v2'])
  await Template.removeTags('e2e-tags', ['stable', 'v2'])
  await assert.rejects(Sandbox.create('e2e-tags:v2'), /not found/)
  await assert.rejects(Template.removeTags('e2e-tags', ['default']))
  await assert.rejects(Template.assignTags('e2e-tags:v1', ':bad'))
})

test('a user of its own', async () => {
  await build(Template().fromBaseImage().setUser('root').runCmd('id -u > /root-id').setUser('runner').runCmd('pwd > where'), 'e2e-user')
  await inside('e2e-user', 'whoami; cat /root-id where', (r) => assert.equal(r.stdout, 'runner\n0\n/home/runner\n'))
})

test('in the background', async () => {
  const info = await Template.buildInBackground(Template().fromBaseImage().skipCache().runCmd('sleep 3'), 'e2e-later:x', { cpuCount: 1, memoryMB: 512 })
  built.add('e2e-later')
  assert.equal((await Template.getBuildStatus(info)).status, 'building')
  for (;;) {
    const { status } = await Template.getBuildStatus(info)
    if (status === 'ready') break
    assert.equal(status, 'building')
    await new Promise((r) => setTimeout(r, 200))
  }
  for (const [options, message] of [[{ cpuCount: 3, memoryMB: 512 }, /1 or an even number/], [{ cpuCount: 1, memoryMB: 64 }, /at least 128/], [{ cpuCount: 64, memoryMB: 512 }, /at most 32/], [{ cpuCount: 1, memoryMB: 513 }, /divisible by 2/]]) {
    await assert.rejects(Template.build(Template().fromBaseImage(), 'e2e-later', options), message)
  }
})

test('a start command runs in every sandbox', async () => {
  const served = Template().fromBaseImage().runCmd('echo served > index.html').setStartCmd('python3 -m http.server 8123', 'curl -sf http://127.0.0.1:8123/')
  await build(served, 'e2e-start')
  await inside('e2e-start', 'curl -s http://127.0.0.1:8123/', (r) => assert.equal(r.stdout, 'served\n'))
  await assert.rejects(build(Template().fromBaseImage().setStartCmd('exit 3', 'false'), 'e2e-start-fails'), /start command .* failed/)
})
