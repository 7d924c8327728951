// The official command line, as npm publishes it.
import assert from 'node:assert/strict'
import { spawnSync } from 'node:child_process'
import fs from 'node:fs'
import os from 'node:os'
import path from 'node:path'
import { after, before, test } from 'node:test'

const name = 'e2e-cli'
let dir

before(() => {
  dir = fs.mkdtempSync(path.join(os.tmpdir(), 'berm-cli-'))
  fs.writeFileSync(path.join(dir, 'words'), 'from the context\n')
  fs.writeFileSync(path.join(dir, 'Dockerfile'), 'FROM e2bdev/base\nRUN echo built > /built\nCOPY words /srv/words\n')
})

after(async () => {
  fs.rmSync(dir, { recursive: true, force: true })
  await fetch(`${process.env.E2B_API_URL}/templates/${name}`, { method: 'DELETE', headers: { 'X-API-Key': process.env.E2B_API_KEY } })
})

// e2b runs a command with a home of its own, and returns its output.
function e2b(args, { input = '', status = 0 } = {}) {
  const run = spawnSync('node_modules/.bin/e2b', args, { input, encoding: 'utf8', env: { ...process.env, HOME: dir, CI: '1' } })
  assert.equal(run.status, status, `e2b ${args.join(' ')}: ${run.stdout}${run.stderr}`)
  return run.stdout
}

const listed = (what) => JSON.parse(e2b([what, 'list', '--format', 'json']))

test('a template and its sandboxes', () => {
  e2b(['template', 'create', name, '-p', dir, '-d', 'Dockerfile', '--cpu-count', '1', '--memory-mb', '512'])
  assert.ok(listed('template').some((t) => t.aliases?.includes(name) || t.names?.includes(name)))
  e2b(['template', 'publish', name, '-y'])
  e2b(['template', 'unpublish', name, '-y'])

  e2b(['sandbox', 'create', name, '--detach'])
  const { sandboxId: id } = listed('sandbox').find((s) => s.name === name)
  assert.equal(e2b(['sandbox', 'exec', id, 'cat', '/built', '/srv/words']), 'built\nfrom the context\n')
  assert.equal(e2b(['sandbox', 'exec', id, 'cat'], { input: 'piped\n' }), 'piped\n')
  e2b(['sandbox', 'exec', id, '--', 'sh', '-c', 'exit 7'], { status: 7 })
  assert.match(e2b(['sandbox', 'info', id]), new RegExp(id))
  assert.match(e2b(['sandbox', 'logs', id]), /Sandbox started/)
  e2b(['sandbox', 'pause', id])
  e2b(['sandbox', 'resume', id])
  e2b(['sandbox', 'kill', id])
  assert.ok(!listed('sandbox').some((s) => s.sandboxId === id))

  e2b(['template', 'delete', name, '-y'])
  assert.ok(!listed('template').some((t) => t.aliases?.includes(name) || t.names?.includes(name)))
})
