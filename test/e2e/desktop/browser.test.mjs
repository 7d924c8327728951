// The template `browser`: Playwright and puppeteer, unchanged, through the router.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { setTimeout } from 'node:timers/promises'
import { Sandbox } from 'e2b'
import { chromium } from 'playwright-core'
import puppeteer from 'puppeteer-core'

const page = `<!doctype html><title>shop</title><input id=name>
<button onclick="document.title = 'hello ' + document.getElementById('name').value">go</button>`

let sandbox
before(async () => {
  sandbox = await Sandbox.create('browser', { timeoutMs: 600_000 })
  await sandbox.files.write('shop/index.html', page)
  await sandbox.commands.run('python3 -m http.server --directory shop 8000', { background: true, timeoutMs: 0 })
  await sandbox.commands.run('until curl -sf localhost:8000 >/dev/null; do sleep 0.1; done')
})
after(() => sandbox?.kill())

const endpoint = (s = sandbox) => `https://${s.getHost(9222)}`
const version = async (s = sandbox) => (await fetch(`${endpoint(s)}/json/version`)).json()

const connect = (url, headers) => chromium.connectOverCDP(url, { headers, timeout: 180_000 })

async function order(browser) {
  const tab = await browser.contexts()[0].newPage()
  tab.setDefaultTimeout(180_000)
  await tab.goto('http://localhost:8000/')
  await tab.fill('#name', 'Berm')
  await tab.click('button')
  assert.equal(await tab.title(), 'hello Berm')
  const picture = await tab.screenshot()
  assert.deepEqual([...picture.subarray(0, 4)], [0x89, 0x50, 0x4e, 0x47])
  await tab.close()
}

test('Playwright, by host name', async () => {
  assert.match((await version()).webSocketDebuggerUrl, new RegExp(`^wss://${sandbox.getHost(9222).replaceAll('.', '\\.')}/devtools/browser/`))
  const browser = await connect(endpoint())
  await order(browser)
  await browser.close()
})

test('Playwright, without names: by headers, over one plain port', async () => {
  const browser = await connect(`http://127.0.0.1:${process.env.E2B_DOMAIN.split(':')[1]}`,
    { 'E2b-Sandbox-Id': sandbox.sandboxId, 'E2b-Sandbox-Port': '9222' })
  await order(browser)
  await browser.close()
})

test('puppeteer, and a browser that was closed is followed by a new one', async () => {
  const before = (await version()).webSocketDebuggerUrl
  const browser = await puppeteer.connect({ browserURL: endpoint() })
  const tab = await browser.newPage()
  tab.setDefaultTimeout(180_000)
  await tab.goto('http://localhost:8000/')
  assert.equal(await tab.title(), 'shop')
  await browser.close() // ends Chromium, where Playwright only leaves it
  const another = async () => {
    const response = await fetch(`${endpoint()}/json/version`)
    return response.ok && (await response.json()).webSocketDebuggerUrl !== before
  }
  for (let tries = 0; !await another(); tries++) {
    assert.ok(tries < 600, 'no new browser')
    await setTimeout(200)
  }
  await order(await connect(endpoint()))
})

test('a page cannot drive the browser that shows it', async () => {
  const browser = await connect(endpoint())
  const tab = await browser.contexts()[0].newPage()
  tab.setDefaultTimeout(180_000)
  await tab.goto('http://localhost:8000/')
  const path = new URL((await version()).webSocketDebuggerUrl).pathname
  const [opened, read] = await tab.evaluate(async (path) => [
    await new Promise((done) => {
      const socket = new WebSocket(`ws://localhost:9222${path}`)
      socket.onopen = () => done(true)
      socket.onerror = () => done(false)
    }),
    await fetch('http://localhost:9222/json/version').then(() => true, () => false),
  ], path)
  assert.deepEqual([opened, read], [false, false])
  await browser.close()
})

test('it runs as the user, and within its own sandbox where it can', async () => {
  const run = await sandbox.commands.run('ps -C chromium -o user= | sort -u; unshare --user true 2>/dev/null && echo open; ps -C chromium -o args= | grep -q -- --no-sandbox && echo without')
    .catch((e) => e)
  assert.match(run.stdout, /^user\n(open\n|without\n)$/)
})

test('with a traffic token nobody else drives it', async () => {
  const closed = await Sandbox.create('browser', { timeoutMs: 60_000, network: { allowPublicTraffic: false } })
  try {
    await assert.rejects(connect(endpoint(closed)), /403/)
    const browser = await connect(endpoint(closed), { 'e2b-traffic-access-token': closed.trafficAccessToken })
    assert.match(browser.version(), /^\d+\./)
    await browser.close()
  } finally {
    await closed.kill()
  }
})
