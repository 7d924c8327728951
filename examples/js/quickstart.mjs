// The official E2B SDK, unchanged, against a Berm server. Set E2B_API_URL,
// E2B_SANDBOX_URL and E2B_API_KEY first.
import { Sandbox } from 'e2b'

const sandbox = await Sandbox.create({ timeoutMs: 60_000 })
console.log('created', sandbox.sandboxId)
try {
  const hello = await sandbox.commands.run('echo "hello from $(whoami) on $(uname -s)"')
  console.log(hello.stdout.trim())

  await sandbox.files.write('data.csv', 'city,population\nBern,134000\nBasel,173000\n')
  const total = await sandbox.commands.run(
    `python3 -c "import csv; print(sum(int(r['population']) for r in csv.DictReader(open('data.csv'))))"`)
  console.log('total', total.stdout.trim())

  await sandbox.commands.run('tr a-z A-Z < data.csv > upper.csv')
  console.log('read back', (await sandbox.files.read('upper.csv')).split('\n')[1])

  // Whatever happens inside stays inside.
  await sandbox.commands.run('sudo rm -rf /usr /etc /home', { timeoutMs: 20_000 }).catch(() => {})
  console.log('deleted the system inside')
} finally {
  await sandbox.kill()
}

const fresh = await Sandbox.create({ timeoutMs: 60_000 })
try {
  const { stdout } = await fresh.commands.run('ls /')
  console.log('a new one has', stdout.trim().split('\n').join(' '))
} finally {
  await fresh.kill()
}
