// The template `desktop`: E2B's desktop SDK, unchanged, and what a person sees through noVNC.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { Sandbox } from '@e2b/desktop'
import { chromium } from 'playwright-core'

let desktop
before(async () => { desktop = await Sandbox.create({ timeoutMs: 900_000, resolution: [1280, 720] }) })
after(() => desktop?.kill())

// until runs a command inside until it succeeds, and returns what it says.
const until = async (command) => (await desktop.commands.run(`until ${command}; do sleep 0.2; done`, { timeoutMs: 120_000 })).stdout.trim()

const size = (png) => [png.readUInt32BE(16), png.readUInt32BE(20)]

test('the screen has the size that was asked for', async () => {
  assert.deepEqual(await desktop.getScreenSize(), { width: 1280, height: 720 })
  assert.deepEqual(size(Buffer.from(await desktop.screenshot())), [1280, 720])
})

test('an application is launched, listed, and gets what is typed', async () => {
  await desktop.launch('xfce4-terminal')
  await until('xdotool search --onlyvisible --class xfce4-terminal')
  const [window] = await desktop.getApplicationWindows('xfce4-terminal')
  assert.match(await desktop.getWindowTitle(window), /^Terminal - user@/)
  await until(`[ "$(xdotool getwindowfocus)" = ${window} ]`)
  assert.equal(await desktop.getCurrentWindowId(), window)
  await desktop.write(`printf %s "it's $((6 * 7))" > typed`)
  await desktop.press('enter')
  assert.equal(await until('cat typed 2>/dev/null'), "it's 42")
})

test('the mouse moves, and drags a window', async () => {
  await desktop.moveMouse(640, 400)
  assert.deepEqual(await desktop.getCursorPosition(), { x: 640, y: 400 })
  const [window] = await desktop.getApplicationWindows('xfce4-terminal')
  const corner = `xwininfo -id ${window} | sed -n 's/.*upper-left [XY]: *//p' | paste -sd ' '`
  const [x, y] = (await desktop.commands.run(corner)).stdout.trim().split(' ').map(Number)
  await desktop.drag([x + 300, y - 15], [x + 420, y + 75]) // by its title
  await until(`[ "$(${corner})" != '${x} ${y}' ]`)
})

test('a file opens in the program for it, a page in the browser', async () => {
  await desktop.files.write('note.txt', 'a note\n')
  await desktop.open('/home/user/note.txt')
  await until('xdotool search --onlyvisible --name note.txt')
  await desktop.files.write('page.html', '<title>a page of ours</title>')
  await desktop.launch('google-chrome', 'file:///home/user/page.html')
  await until(`xdotool search --onlyvisible --name 'a page of ours'`)
  assert.ok((await desktop.getApplicationWindows('google-chrome')).length >= 1)
  await desktop.commands.run('pkill mousepad; pkill chromium')
})

test('a person sees it and types through noVNC', async () => {
  await desktop.stream.start({ requireAuth: true })
  const url = desktop.stream.getUrl({ authKey: desktop.stream.getAuthKey() })
  const viewer = await chromium.launch({
    executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
    timeout: 180_000,
    args: ['--no-sandbox', `--host-resolver-rules=MAP *.${process.env.E2B_DOMAIN.split(':')[0]} 127.0.0.1`],
  })
  try {
    const tab = await viewer.newPage({ ignoreHTTPSErrors: true, viewport: { width: 1280, height: 720 } })
    tab.setDefaultTimeout(180_000)
    await tab.goto(url)
    const canvas = tab.locator('#noVNC_container canvas')
    await canvas.waitFor()
    assert.deepEqual(await canvas.evaluate((c) => [c.width, c.height]), [1280, 720])
    // The wallpaper's colour where nothing else is, as the desktop itself has it.
    await tab.waitForFunction(() => {
      const c = document.querySelector('#noVNC_container canvas')
      const [r, g, b] = c.getContext('2d').getImageData(1270, 700, 1, 1).data
      return r + g + b > 0
    })
    await desktop.commands.run(`xdotool windowactivate --sync $(xdotool search --onlyvisible --class xfce4-terminal | head -1)`)
    await canvas.focus()
    await tab.keyboard.type('echo seen > seen')
    await tab.keyboard.press('Enter')
    assert.equal(await until('cat seen 2>/dev/null'), 'seen')
    if (process.env.BERM_SCREENSHOT) await tab.screenshot({ path: process.env.BERM_SCREENSHOT })
  } finally {
    await viewer.close()
  }
  await desktop.stream.stop()
  await until('! pgrep -x x11vnc >/dev/null')
  await desktop.stream.start() // once more, for everybody
  assert.equal((await fetch(desktop.stream.getUrl())).status, 200)
  await desktop.stream.stop()
})
