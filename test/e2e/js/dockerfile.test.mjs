// Templates that the command line builds of Dockerfiles.
import assert from 'node:assert/strict'
import { spawn, spawnSync } from 'node:child_process'
import fs from 'node:fs'
import os from 'node:os'
import path from 'node:path'
import { after, before, test } from 'node:test'

import { Sandbox } from 'e2b'

const berm = process.env.BERM_BINARY
const name = 'e2e-dockerfile'
let context

before(() => {
  context = fs.mkdtempSync(path.join(os.tmpdir(), 'berm-dockerfile-'))
  fs.mkdirSync(path.join(context, 'src/node_modules'), { recursive: true })
  fs.writeFileSync(path.join(context, 'src/words'), 'from the context\n')
  fs.writeFileSync(path.join(context, 'src/node_modules/none'), '')
  fs.writeFileSync(path.join(context, 'tool.sh'), '#!/bin/sh\necho tool "$GREETING"\n')
  fs.writeFileSync(path.join(context, '.dockerignore'), '**/node_modules\n')
})

after(async () => {
  fs.rmSync(context, { recursive: true, force: true })
  await fetch(`${process.env.E2B_API_URL}/templates/${name}`, { method: 'DELETE', headers: { 'X-API-Key': process.env.E2B_API_KEY } })
})

// build writes a Dockerfile and builds it.
function build(dockerfile, ...args) {
  fs.writeFileSync(path.join(context, 'Dockerfile'), dockerfile)
  return spawnSync(berm, ['template', 'build', context, '--name', name, '--memory', '512MiB', ...args], { encoding: 'utf8' })
}

const stages = `ARG BASE=e2bdev/base
FROM $BASE AS build
ARG VERSION=1
WORKDIR /src
COPY src .
RUN ls -a > names && echo "version $VERSION" > version && chown user version

FROM $BASE
ENV GREETING=hello PATH=/opt/app/bin:$PATH
COPY --from=build /src/names /src/version /opt/app/
COPY --chmod=755 tool.sh /opt/app/bin/tool
RUN tool > /opt/app/told
USER user
WORKDIR /opt/app
CMD ["python3"]
`

test('stages, files, variables, cache', async () => {
  const first = build(stages, '--build-arg', 'VERSION=2', '--json')
  assert.equal(first.status, 0, first.stderr)
  assert.match(first.stderr, /Dockerfile:15: CMD: is not started/)
  assert.match(first.stderr, /\[3\/9\] RUN ls -a/)
  assert.deepEqual(JSON.parse(first.stdout).names, [name])
  const sandbox = await Sandbox.create(name, { timeoutMs: 60_000 })
  try {
    const { stdout } = await sandbox.commands.run('whoami; pwd; bin/tool; cat names version told; stat -c %U names version')
    assert.equal(stdout, 'user\n/opt/app\ntool hello\n.\n..\nnames\nwords\nversion 2\ntool hello\nroot\nuser\n')
  } finally {
    await sandbox.kill()
  }

  // Nothing has changed: nothing is done. In one stage something has: the other is as it was.
  const done = (run) => run.stderr.split('\n').filter((l) => /\[\d+\/9\]/.test(l) && !l.includes('(cached)')).length
  assert.equal(done(build(stages, '--build-arg', 'VERSION=2')), 0)
  const changed = build(stages, '--build-arg', 'VERSION=3')
  assert.equal(changed.status, 0, changed.stderr)
  assert.match(changed.stderr, /\[2\/9\] COPY src \. \(cached\)/)
  assert.doesNotMatch(changed.stderr, /\[3\/9\].*\(cached\)/)
})

test('what fails is named with its line', () => {
  for (const [dockerfile, said] of [
    ['FROM e2bdev/base\n\nRUN echo before && exit 3\n', /Dockerfile:3: RUN: failed to run command 'echo before && exit 3': exit status 3/],
    ['FROM e2bdev/base\nCOPY none /x\n', /Dockerfile:2: COPY: the context has no none/],
    ['FROM e2bdev/base AS a\nFROM e2bdev/base\nCOPY --from=a /none /x\n', /Dockerfile:3: COPY: failed to copy/],
    ['FROM e2bdev/base\nRUN --mount=type=ssh x\n', /Dockerfile:2: RUN: --mount=type=ssh/],
  ]) {
    const run = build(dockerfile)
    assert.equal(run.status, 1)
    assert.match(run.stderr, said)
  }
})

test('an interrupt ends the build', async () => {
  fs.writeFileSync(path.join(context, 'Dockerfile'), 'FROM e2bdev/base\nRUN echo begun; sleep 600\n')
  const run = spawn(berm, ['template', 'build', context, '--name', `${name}:never`])
  let said = '', stopped = false
  run.stderr.on('data', (part) => {
    said += part
    if (!stopped && /\bbegun$/m.test(said)) stopped = run.kill('SIGINT') // a second one ends it at once
  })
  const code = await new Promise((resolve) => run.on('close', resolve))
  assert.equal(code, 130, said)
  assert.match(said, /the build was cancelled/)
  const { builds } = await (await fetch(`${process.env.E2B_API_URL}/templates/${name}`, { headers: { 'X-API-Key': process.env.E2B_API_KEY } })).json()
  const states = builds.map((b) => b.status)
  assert.ok(!states.includes('waiting'), states)
})
