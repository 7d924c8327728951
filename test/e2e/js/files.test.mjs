// The official JavaScript SDK against a running server: files, watches, signed URLs.
import assert from 'node:assert/strict'
import { createHash, randomBytes } from 'node:crypto'
import { after, before, test } from 'node:test'
import { FileNotFoundError, FilesystemEventType, Sandbox } from 'e2b'

let sandbox
before(async () => { sandbox = await Sandbox.create({ timeoutMs: 300_000 }) })
after(() => sandbox?.kill())

const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms))
const hash = (bytes) => createHash('sha256').update(bytes).digest('hex')

test('write and read: text, bytes, empty, many, deep, absolute', async () => {
  const info = await sandbox.files.write('a/b/c.txt', 'héllo')
  assert.equal(info.path, '/home/user/a/b/c.txt')
  assert.equal(await sandbox.files.read('a/b/c.txt'), 'héllo')
  await sandbox.files.write('/0/x.txt', 'root made the directory')
  assert.equal(await sandbox.files.read('/0/x.txt'), 'root made the directory')
  await sandbox.files.write('empty', '')
  assert.equal(await sandbox.files.read('empty'), '')
  await sandbox.files.write('a/b/c.txt', 'x')
  assert.equal(await sandbox.files.read('a/b/c.txt'), 'x')
  const many = await sandbox.files.write([1, 2, 3].map((i) => ({ path: `many/${i}`, data: `n${i}` })))
  assert.deepEqual(many.map((f) => f.name), ['1', '2', '3'])
  assert.equal((await sandbox.commands.run('stat -c "%U:%G %a" a/b/c.txt a')).stdout, 'user:user 644\nuser:user 755\n')
})

test('large binary files both ways, gzip too', async () => {
  const bytes = randomBytes(8 << 20)
  await sandbox.files.write('large', new Blob([bytes]))
  assert.equal((await sandbox.commands.run('sha256sum large')).stdout.slice(0, 64), hash(bytes))
  assert.equal(hash(await sandbox.files.read('large', { format: 'bytes' })), hash(bytes))
  await sandbox.files.write('zipped', new Blob([bytes]), { gzip: true })
  assert.equal(hash(await sandbox.files.read('zipped', { format: 'bytes', gzip: true })), hash(bytes))
})

test('list, info, exists, rename, remove, makeDir', async () => {
  assert.equal(await sandbox.files.makeDir('dir/sub'), true)
  assert.equal(await sandbox.files.makeDir('dir/sub'), false)
  await sandbox.files.write('dir/one', '1')
  await sandbox.commands.run('ln -s one dir/link')
  const listed = await sandbox.files.list('dir', { depth: 2 })
  assert.deepEqual(listed.map((e) => [e.name, e.type]), [['link', 'file'], ['one', 'file'], ['sub', 'dir']])
  const info = await sandbox.files.getInfo('dir/link')
  assert.equal(info.symlinkTarget, '/home/user/dir/one')
  await sandbox.files.rename('dir/one', 'elsewhere/uno')
  assert.equal(await sandbox.files.exists('dir/one'), false)
  assert.equal(await sandbox.files.read('elsewhere/uno'), '1')
  await sandbox.files.remove('dir')
  await sandbox.files.remove('dir')
  assert.equal(await sandbox.files.exists('dir'), false)
  await assert.rejects(sandbox.files.read('dir/one'), FileNotFoundError)
  await assert.rejects(sandbox.files.list('dir'), FileNotFoundError)
})

test('metadata of files', async () => {
  await sandbox.files.write('tagged', 'x', { metadata: { purpose: 'test' } })
  assert.deepEqual((await sandbox.files.getInfo('tagged')).metadata, { purpose: 'test' })
  await sandbox.files.write('tagged', 'y')
  assert.equal((await sandbox.files.getInfo('tagged')).metadata, undefined)
})

test('a full disk is a clear error', async () => {
  const small = await Sandbox.create({ timeoutMs: 120_000 })
  try {
    await small.commands.run('fallocate -l 1P huge 2>/dev/null; dd if=/dev/zero of=fill bs=4M 2>/dev/null; true', { timeoutMs: 100_000 })
    await assert.rejects(small.files.write('more', new Blob([randomBytes(8 << 20)])), /space/i)
    assert.equal((await small.commands.run('rm fill; echo still here')).stdout, 'still here\n')
  } finally {
    await small.kill()
  }
})

test('watch: files made, written, renamed, removed; new directories too', async () => {
  await sandbox.files.makeDir('watched')
  const events = []
  const handle = await sandbox.files.watchDir('watched', (event) => events.push(event), { recursive: true })
  const until = async (type, name) => {
    for (let i = 0; i < 60; i++) {
      if (events.some((e) => e.type === type && e.name === name)) return
      await wait(50)
    }
    assert.fail(`no ${type} of ${name} in ${JSON.stringify(events)}`)
  }
  await sandbox.files.write('watched/f', '1')
  await until(FilesystemEventType.CREATE, 'f')
  await until(FilesystemEventType.WRITE, 'f')
  await sandbox.files.rename('watched/f', 'watched/g')
  await until(FilesystemEventType.RENAME, 'f')
  await sandbox.files.remove('watched/g')
  await until(FilesystemEventType.REMOVE, 'g')
  await sandbox.files.makeDir('watched/new/deep')
  await until(FilesystemEventType.CREATE, 'new')
  await wait(100)
  await sandbox.files.write('watched/new/deep/h', '2')
  await until(FilesystemEventType.WRITE, 'new/deep/h')
  await handle.stop()
  const count = events.length
  await sandbox.files.write('watched/after', '3')
  await wait(300)
  assert.equal(events.length, count)
  await assert.rejects(sandbox.files.watchDir('nowhere', () => {}), FileNotFoundError)
})

test('signed URLs work without a header, for their path, user and time only', async () => {
  await sandbox.files.write('signed', 'for you')
  const url = await sandbox.downloadUrl('signed', { useSignatureExpiration: 120 })
  const read = await fetch(url)
  assert.equal(read.status, 200)
  assert.equal(await read.text(), 'for you')

  const wrong = new URL(url)
  wrong.searchParams.set('path', '/etc/passwd')
  assert.equal((await fetch(wrong)).status < 300, false)
  const late = await sandbox.downloadUrl('signed', { useSignatureExpiration: -120 })
  const refused = await fetch(late)
  assert.equal(refused.status, 401)
  assert.deepEqual(await refused.json(), { code: 401, message: 'signature is already expired' })

  const form = new FormData()
  form.append('file', 'uploaded')
  const write = await fetch(await sandbox.uploadUrl('up', { useSignatureExpiration: 120 }), { method: 'POST', body: form })
  assert.equal(write.status, 200)
  assert.equal(await sandbox.files.read('up'), 'uploaded')
})

test('hostile paths stay inside and do not hang', async () => {
  await sandbox.commands.run('mkfifo fifo; ln -s /proc/self/root/../../etc/hostname out; ln -s loop loop')
  await assert.rejects(sandbox.files.read('loop'))
  const fifo = sandbox.files.read('fifo', { requestTimeoutMs: 5_000 }).then(() => 'read', () => 'refused')
  await fifo
  assert.equal((await sandbox.commands.run('echo alive')).stdout, 'alive\n')
  assert.ok((await sandbox.files.read('/proc/self/status')).length > 0)
  const passwd = await sandbox.files.read('/../../../../etc/passwd')
  assert.match(passwd, /^user:/m)
})

test('git inside', async () => {
  const { stdout } = await sandbox.commands.run(
    'git init -q repo && cd repo && git config user.email a@b.c && git config user.name n && echo x >f && git add f && git commit -qm one && git log --oneline | wc -l')
  assert.equal(stdout.trim(), '1')
})
