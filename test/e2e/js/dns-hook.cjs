// Preloaded into Node (--require) so that every name below E2B_DOMAIN resolves
// to 127.0.0.1: whole-host URLs then work with no DNS server and no hosts file.
const dns = require('node:dns')

const domain = (process.env.E2B_DOMAIN ?? '').replace(/:\d+$/, '')
const ours = (name) => domain !== '' && (name === domain || name.endsWith('.' + domain))

const lookup = dns.lookup
dns.lookup = function (name, options, callback) {
  if (typeof options === 'function') [callback, options] = [options, {}]
  if (!ours(name)) return lookup.call(dns, name, options, callback)
  const all = typeof options === 'object' && options?.all
  process.nextTick(() =>
    all ? callback(null, [{ address: '127.0.0.1', family: 4 }]) : callback(null, '127.0.0.1', 4)
  )
}

const promised = dns.promises.lookup
dns.promises.lookup = async (name, options = {}) => {
  if (!ours(name)) return promised(name, options)
  const entry = { address: '127.0.0.1', family: 4 }
  return options.all ? [entry] : entry
}
