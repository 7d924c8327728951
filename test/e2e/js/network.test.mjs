// What a sandbox reaches, as E2B's own tests of network and internetAccess ask it. The public
// addresses belong to an internet that test/network makes; without it nothing is reached.
import assert from 'node:assert/strict'
import { createHash } from 'node:crypto'
import { after, test } from 'node:test'
import { ALL_TRAFFIC, Sandbox, Secret } from 'e2b'

const made = []
after(() => Promise.all(made.map((s) => s.kill())))

async function create(options = {}) {
  const sandbox = await Sandbox.create({ timeoutMs: 60_000, ...options })
  made.push(sandbox)
  return sandbox
}

async function reaches(sandbox, url) {
  try {
    const r = await sandbox.commands.run(`curl -fsk --max-time 4 -o /dev/null -w '%{http_code}' ${url}`)
    assert.ok(Number(r.stdout) < 400)
    return true
  } catch (e) {
    assert.ok(e.exitCode > 0, String(e))
    return false
  }
}

async function expect(sandbox, urls) {
  for (const [url, want] of Object.entries(urls)) assert.equal(await reaches(sandbox, url), want, url)
}

const one = 'https://1.1.1.1'
const eight = 'https://8.8.8.8'

test('the internet is there by default and when it is asked for', async () => {
  await expect(await create(), { [one]: true, 'https://www.example.com': true })
  await expect(await create({ allowInternetAccess: true }), { [one]: true })
})

test('the internet can be left out', async () => {
  await expect(await create({ allowInternetAccess: false }), { [one]: false, 'https://www.example.com': false })
})

test('an address is allowed and all else denied', async () => {
  const sandbox = await create({ network: { denyOut: [ALL_TRAFFIC], allowOut: ['1.1.1.1'] } })
  await expect(sandbox, { [one]: true, [eight]: false })
})

test('an address is denied', async () => {
  await expect(await create({ network: { denyOut: ['8.8.8.8'] } }), { [one]: true, [eight]: false })
})

test('what is allowed wins over what is denied', async () => {
  await expect(await create({ network: { denyOut: ['8.8.8.8', ALL_TRAFFIC], allowOut: ['8.8.8.8', '1.1.1.1'] } }), { [one]: true, [eight]: true })
})

test('names and wildcards', async () => {
  const sandbox = await create({ network: { denyOut: [ALL_TRAFFIC], allowOut: ['*.example.com'] } })
  await expect(sandbox, { 'https://www.example.com': true, 'https://files.example.com': true, 'https://other.example.org': false, [one]: false })
})

test('a name needs all traffic denied', async () => {
  await assert.rejects(create({ network: { allowOut: ['www.example.com'] } }), /ALL_TRAFFIC/)
})

test('an update denies what was reached, an empty one opens all, rules outlive a pause', async () => {
  const sandbox = await create()
  await expect(sandbox, { [eight]: true })
  await sandbox.updateNetwork({ denyOut: ['8.8.8.8'] })
  await expect(sandbox, { [eight]: false, [one]: true })
  await sandbox.pause()
  await sandbox.connect()
  await expect(sandbox, { [eight]: false, [one]: true })
  await sandbox.updateNetwork({})
  await expect(sandbox, { [eight]: true })
})

test('private networks and metadata services are never reached', async () => {
  const sandbox = await create({ network: { allowOut: ['10.0.0.0/8', '169.254.169.254', '100.64.0.0/10'] } })
  await expect(sandbox, { 'http://10.9.9.9': false, 'http://169.254.169.254': false, 'http://100.64.9.9': false, 'http://rebind.example.net': false })
})

// What the internet of the test got in a field, which it does not tell.
async function got(sandbox, host, field) {
  const r = await sandbox.commands.run(`curl -sS --max-time 8 'https://${host}/hash?field=${field}'`)
  return r.stdout
}

const hash = (text) => createHash('sha256').update(text).digest('hex')
const rule = (headers) => [{ transform: { headers } }]

test('headers are set on the way, and what they are made of is not inside', async () => {
  const sandbox = await create({ network: { rules: { 'www.example.com': rule({ 'X-Injected': 'injected by the rule' }) } } })
  assert.equal(await got(sandbox, 'www.example.com', 'X-Injected'), hash('injected by the rule'))
  const python = await sandbox.commands.run(`python3 -c "import urllib.request; print(urllib.request.urlopen('https://www.example.com/hash?field=X-Injected').read().decode())"`)
  assert.equal(python.stdout.trim(), hash('injected by the rule'))
  await sandbox.updateNetwork({ rules: { '*.example.com': rule({ 'X-Injected': 'by a wildcard' }), 'files.example.com': rule({ 'X-Other': 'exact' }) } })
  assert.equal(await got(sandbox, 'www.example.com', 'X-Injected'), hash('by a wildcard'))
  assert.equal(await got(sandbox, 'files.example.com', 'X-Injected'), hash(''))
  assert.equal(await got(sandbox, 'files.example.com', 'X-Other'), hash('exact'))
  await sandbox.pause()
  await sandbox.connect()
  assert.equal(await got(sandbox, 'www.example.com', 'X-Injected'), hash('by a wildcard'))
  // Rules allow nothing.
  await sandbox.updateNetwork({ denyOut: [ALL_TRAFFIC], rules: { 'www.example.com': rule({ 'X-Injected': 'x' }) } })
  await expect(sandbox, { 'https://www.example.com': false })
  await assert.rejects(create({ network: { rules: { 'www.example.com': rule({ 'a\nb': 'x' }) } } }), /CR or LF/)
})

test('secrets are stored, filled in on the way, changed and destroyed', async () => {
  await Secret.destroy('Sdk_Token').catch(() => {})
  const made = await Secret.create('Sdk_Token', 'first-value-of-the-secret', { metadata: { team: 'a' } })
  assert.match(made.secretId, /^sec_/)
  assert.equal(made.name, 'sdk_token')
  assert.equal(made.version, 1)
  await assert.rejects(Secret.create('sdk_token', 'another'), /already/)
  const sandbox = await create({ network: { rules: { 'www.example.com': rule({ Authorization: `Bearer ${Secret.fill('Sdk_Token')}` }) } } })
  assert.equal(await got(sandbox, 'www.example.com', 'Authorization'), hash('Bearer first-value-of-the-secret'))
  const shown = await sandbox.commands.run('curl -sS https://www.example.com/echo; env')
  assert.ok(!shown.stdout.includes('first-value') && shown.stdout.includes('Bearer *****'), shown.stdout)
  const updated = await Secret.update(made.secretId, 'second-value-of-the-secret')
  assert.equal(updated.version, 2)
  assert.deepEqual(updated.metadata, { team: 'a' })
  assert.equal(await got(sandbox, 'www.example.com', 'Authorization'), hash('Bearer second-value-of-the-secret'))
  const names = []
  for (let pages = Secret.list({ limit: 1 }); pages.hasNext; ) names.push(...(await pages.nextItems()).map((s) => s.name))
  assert.ok(names.includes('sdk_token'), String(names))
  assert.ok(await Secret.exists('sdk_token'))
  assert.ok(await Secret.destroy('sdk_token'))
  assert.ok(!(await Secret.destroy('sdk_token')))
  assert.match(await got(sandbox, 'www.example.com', 'Authorization'), /credential_revoked/)
})
