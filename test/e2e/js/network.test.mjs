// What a sandbox reaches, as E2B's own tests of network and internetAccess ask it. The public
// addresses belong to an internet that test/network makes; without it nothing is reached.
import assert from 'node:assert/strict'
import { after, test } from 'node:test'
import { ALL_TRAFFIC, Sandbox } from 'e2b'

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
