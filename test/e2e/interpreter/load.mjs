// 1,000 × print(1), 20 at once, over several sandboxes: no answer may be empty.
import { Sandbox } from '@e2b/code-interpreter'

const [total, atOnce, sandboxes] = [1000, 20, 4]
const all = await Promise.all(Array.from({ length: sandboxes }, () => Sandbox.create({ timeoutMs: 900_000 })))
const bad = []
let next = 0
const start = Date.now()
await Promise.all(Array.from({ length: atOnce }, async () => {
  for (let i = next++; i < total; i = next++) {
    const run = await all[i % sandboxes].runCode('print(1)').catch((e) => ({ logs: { stdout: [String(e)] } }))
    if (run.logs.stdout.join('') !== '1\n') bad.push(JSON.stringify(run))
  }
}))
console.log(`${total} × print(1), ${atOnce} at once over ${sandboxes} sandboxes: ${bad.length} wrong, ${Date.now() - start} ms`)
await Promise.all(all.map((s) => s.kill()))
if (bad.length) {
  console.error(bad.slice(0, 5).join('\n'))
  process.exit(1)
}
