'use strict';
// All text goes into the page as text nodes, never as markup.
(() => {
  const data = JSON.parse(document.getElementById('data').textContent);
  const make = (tag, attributes, ...children) => {
    const e = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith('on')) e.addEventListener(name.slice(2), value);
      else e.setAttribute(name, value);
    }
    e.append(...children);
    return e;
  };
  const pad = (n, digits) => String(n).padStart(digits, '0');
  const clock = (t) => {
    t = Math.max(0, Math.floor(t));
    const h = Math.floor(t / 3600000);
    return (h ? h + ':' : '') + pad(Math.floor(t / 60000) % 60, 2) + ':' + pad(Math.floor(t / 1000) % 60, 2) + '.' + pad(t % 1000, 3);
  };
  // How many entries of a list, in order of key, are at most t.
  const until = (list, t, key) => {
    let low = 0, high = list.length;
    while (low < high) {
      const mid = (low + high) >> 1;
      if (key(list[mid]) <= t) low = mid + 1; else high = mid;
    }
    return low;
  };

  const state = { now: data.from, playing: false, speed: 1, skip: true, chosen: null, file: null };
  const moments = data.events.map((e) => e.t).concat(...data.commands.map((c) => c.screens.map((s) => s[0]))).sort((a, b) => a - b);

  // The panes.
  const panes = {};
  const addPane = (name, title, body, foot) => {
    const head = make('h2', {}, make('b', {}, title), ' ');
    const about = make('span', {});
    head.append(about);
    panes[name] = { about, body, foot, shown: null };
    return make('section', { class: name }, head, body, ...(foot ? [foot] : []));
  };
  const has = (name) => data.panes.includes(name);
  const left = make('div', {}), right = make('div', {});
  if (has('terminal')) {
    const section = addPane('terminal', 'Terminal', make('div', { class: 'screen' }), make('div', { class: 'foot dim' }));
    const select = make('select', { 'aria-label': 'command', onchange: () => { state.chosen = select.value === '' ? null : Number(select.value); show(); } },
      make('option', { value: '' }, 'the one that runs'));
    data.commands.forEach((c, i) => select.append(make('option', { value: String(i) }, '#' + c.n + ' ' + c.name.slice(0, 80))));
    section.querySelector('h2').append(' ', select);
    left.append(section);
  }
  if (has('processes')) left.append(addPane('processes', 'Processes', make('div', { class: 'list' })));
  if (has('files')) right.append(addPane('files', 'Files', make('div', { class: 'list' })));
  if (has('network')) right.append(addPane('network', 'Network', make('div', { class: 'list' })));
  if (has('credentials')) right.append(addPane('credentials', 'Credentials', make('div', { class: 'list' })));
  right.append(addPane('events', 'Events', make('div', { class: 'list' })));

  // The clock and the bar.
  const play = make('button', { onclick: () => toggle() }, 'Play');
  const time = make('span', { class: 'clock' });
  const speed = make('select', { 'aria-label': 'speed', onchange: () => { state.speed = Number(speed.value); } });
  for (const s of [0.25, 0.5, 1, 2, 4, 8, 16, 64, 256]) speed.append(make('option', { value: String(s) }, s + '×'));
  speed.value = '1';
  const skip = make('input', { type: 'checkbox', checked: '', onchange: () => { state.skip = skip.checked; } });
  const here = make('b', {});
  const bar = make('div', { class: 'bar', onclick: (e) => { const r = bar.getBoundingClientRect(); seek((e.clientX - r.left) / r.width * data.length); } }, here);
  const ticks = new Map();
  for (const e of data.events) {
    const at = Math.round(e.t / Math.max(1, data.length) * 1000);
    ticks.set(at, ticks.get(at) || e.b);
  }
  for (const [at, bad] of ticks) {
    const tick = make('i', bad ? { class: 'bad' } : {});
    tick.style.left = at / 10 + '%';
    bar.append(tick);
  }
  document.getElementById('app').append(
    make('header', {}, make('h1', {}, 'Sandbox ' + data.sandbox), make('span', { class: 'dim' }, data.about.join(' · '))),
    ...(data.warnings || []).map((w) => make('div', { class: 'warn' }, '! ' + w)),
    make('div', { class: 'controls' }, play, time, speed, make('label', {}, skip, ' skip idle time'),
      make('button', { onclick: () => bad(1) }, 'Next denial or failure'),
      make('span', { class: 'dim' }, 'space: play, ← →: 5 s, n N: events, d D: denials and failures')),
    bar, make('main', {}, ...(left.children.length ? [left] : []), right));
  if (!left.children.length) document.querySelector('main').style.gridTemplateColumns = 'minmax(0, 1fr)';

  const color = (c) => {
    if (c >= 1 << 24) return '#' + pad((c - (1 << 24)).toString(16), 6);
    const n = c - 1;
    const base = ['#3b4048', '#e06c75', '#98c379', '#e5c07b', '#61afef', '#c678dd', '#56b6c2', '#c8ccd4', '#6b7280', '#ff7b86', '#b5e890', '#ffd78f', '#82c7ff', '#e29df5', '#7fe3ef', '#ffffff'];
    if (n < 16) return base[n];
    if (n >= 232) { const v = 8 + (n - 232) * 10; return `rgb(${v},${v},${v})`; }
    const part = (k) => { const v = Math.floor((n - 16) / k) % 6; return v ? 55 + v * 40 : 0; };
    return `rgb(${part(36)},${part(6)},${part(1)})`;
  };
  const line = (runs) => {
    const e = make('div', {});
    for (const run of runs) {
      if (typeof run === 'string') { e.append(run); continue; }
      const [text, fg, bg, attr] = run;
      const span = make('span', {}, text);
      let front = fg ? color(fg) : '', back = bg ? color(bg) : '';
      if (attr & 16) [front, back] = [back || '#0d0f13', front || '#d7dae0'];
      if (front) span.style.color = front;
      if (back) span.style.backgroundColor = back;
      if (attr & 1) span.style.fontWeight = 'bold';
      if (attr & 2) span.style.opacity = '.7';
      if (attr & 4) span.style.fontStyle = 'italic';
      if (attr & 8) span.style.textDecoration = 'underline';
      if (attr & 32) span.style.textDecoration = 'line-through';
      e.append(span);
    }
    return e;
  };
  // Does something only when what it shows has changed.
  const once = (pane, key, draw) => {
    if (pane.shown === key) return;
    pane.shown = key;
    draw();
  };

  const showing = () => {
    if (state.chosen !== null) return state.chosen;
    let best = -1;
    data.commands.forEach((c, i) => {
      if (c.start > state.now) return;
      if (best < 0 || c.end > state.now || data.commands[best].end <= state.now) best = i;
    });
    return best;
  };
  const showTerminal = () => {
    const pane = panes.terminal, i = showing();
    if (i < 0) {
      once(pane, 'none', () => { pane.body.replaceChildren(make('div', { class: 'dim' }, 'no command yet')); pane.foot.textContent = ''; });
      return;
    }
    const c = data.commands[i], n = until(c.screens, state.now, (s) => s[0]);
    const running = c.end > state.now;
    pane.foot.textContent = (running ? 'running for ' + clock(Math.max(0, state.now - c.start)) : c.result) + (c.note ? ', ' + c.note : '');
    pane.foot.className = 'foot ' + (!running && c.failed ? 'bad' : 'dim');
    once(pane, i + '/' + n, () => {
      pane.about.textContent = '#' + c.n + ' ' + c.name;
      const rows = n ? c.screens[n - 1].slice(1) : [];
      pane.body.replaceChildren(...rows.map((id) => line(c.lines[id])));
      pane.body.scrollTop = pane.body.scrollHeight;
    });
  };

  const showProcesses = () => {
    const pane = panes.processes, linger = 2000 * state.speed;
    const alive = [];
    data.processes.forEach((p, i) => { if (p.start <= state.now && (p.end < 0 || p.end + linger > state.now)) alive.push(i); });
    const name = (p) => { const n = until(p.images, state.now, (x) => x[0]); return n ? p.images[n - 1][1] : '?'; };
    const ended = (p) => p.end >= 0 && p.end <= state.now;
    once(pane, alive.map((i) => i + (ended(data.processes[i]) ? 'e' : '') + name(data.processes[i])).join(), () => {
      const here = new Set(alive), children = new Map(), rows = [];
      for (const i of alive) {
        const up = here.has(data.processes[i].parent) ? data.processes[i].parent : -1;
        children.set(up, (children.get(up) || []).concat(i));
      }
      const place = (up, depth) => {
        for (const i of children.get(up) || []) {
          const p = data.processes[i];
          rows.push(make('div', { class: ended(p) ? (p.failed ? 'bad' : 'dim') : '' }, pad(p.pid || '', 6).replace(/^0+/, (z) => ' '.repeat(z.length)) + ' ' + '  '.repeat(Math.min(depth, 20)) +
            (p.guest ? '(guest) ' : '') + name(p) + (ended(p) && p.result ? '  ' + p.result : '')));
          if (depth < 200) place(i, depth + 1);
        }
      };
      place(-1, 0);
      pane.about.textContent = String(rows.length);
      pane.body.replaceChildren(...rows.slice(0, 500));
    });
  };

  const showFiles = () => {
    const pane = panes.files, n = until(data.files, state.now, (f) => f.t);
    once(pane, n + '/' + state.file, () => {
      if (!n) {
        pane.about.textContent = '';
        pane.body.replaceChildren(make('div', { class: 'dim' }, data.noFiles || 'nothing differs, as far as is known at this time'));
        return;
      }
      const look = data.files[n - 1], rows = [];
      pane.about.textContent = look.list.length + ', ' + look.from;
      for (const f of look.list.slice(0, 2000)) {
        const chosen = state.file === f.name;
        rows.push(make('div', { class: 'pick op-' + (['add', 'modify', 'delete'].includes(f.op) ? f.op : 'other') + (chosen ? ' chosen' : ''), onclick: () => { state.file = chosen ? null : f.name; show(); } }, f.op.padEnd(7) + f.name));
        if (!chosen) continue;
        for (const text of data.diffs[f.diff].split('\n')) {
          const kind = text.startsWith('@@') ? 'hunk' : text.startsWith('+') ? 'plus' : text.startsWith('-') ? 'minus' : '';
          rows.push(make('div', { class: kind }, '  ' + text));
        }
      }
      pane.body.replaceChildren(...rows);
    });
  };

  const lanes = { network: 'net', credentials: 'credential' };
  const events = { network: data.events.filter((e) => e.l === 'net'), credentials: data.events.filter((e) => e.l === 'credential'), events: data.events };
  const showEvents = (name) => {
    const pane = panes[name], n = until(events[name], state.now, (e) => e.t);
    once(pane, n, () => {
      pane.about.textContent = String(n);
      pane.body.replaceChildren(...events[name].slice(Math.max(0, n - 300), n).map((e) => make('div', { class: e.b ? 'bad' : e.g && lanes[name] ? 'good' : '' },
        make('span', { class: 'time', onclick: () => seek(e.t) }, clock(e.t) + ' '), ...(lanes[name] ? [] : [make('span', { class: 'lane' }, e.l)]), e.x)));
      pane.body.scrollTop = pane.body.scrollHeight;
    });
  };

  const show = () => {
    time.textContent = clock(state.now) + ' / ' + clock(data.length);
    play.textContent = state.playing ? 'Pause' : 'Play';
    here.style.left = state.now / Math.max(1, data.length) * 100 + '%';
    if (has('terminal')) showTerminal();
    if (has('processes')) showProcesses();
    if (has('files')) showFiles();
    for (const name of ['network', 'credentials', 'events']) if (has(name)) showEvents(name);
  };
  const seek = (t) => { state.now = Math.min(Math.max(0, t), data.length); show(); };
  let last = 0;
  const frame = (at) => {
    if (!state.playing) return;
    let next = state.now + Math.min(at - last, 1000) * state.speed;
    last = at;
    const n = until(moments, state.now, (m) => m);
    if (state.skip && n < moments.length && moments[n] - state.now > 2000 * state.speed) next = moments[n] - 500 * state.speed;
    if (next >= data.length) state.playing = false;
    seek(next);
    requestAnimationFrame(frame);
  };
  const toggle = () => {
    state.playing = !state.playing;
    if (state.playing && state.now >= data.length) state.now = 0;
    last = performance.now();
    if (state.playing) requestAnimationFrame(frame);
    show();
  };
  const step = (by, counts) => {
    const found = by > 0 ? data.events.find((e) => e.t > state.now && counts(e)) : data.events.findLast((e) => e.t < state.now && counts(e));
    if (found) seek(found.t);
  };
  const bad = (by) => step(by, (e) => e.b);
  document.addEventListener('keydown', (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey || ['SELECT', 'INPUT', 'SUMMARY'].includes(e.target.tagName)) return;
    const keys = {
      ' ': toggle, ArrowRight: () => seek(state.now + 5000), ArrowLeft: () => seek(state.now - 5000), Home: () => seek(0), End: () => seek(data.length),
      n: () => step(1, () => true), N: () => step(-1, () => true), d: () => bad(1), D: () => bad(-1),
    };
    if (!keys[e.key]) return;
    e.preventDefault();
    if (e.target.tagName === 'BUTTON') e.target.blur();
    keys[e.key]();
  });
  // A link to a moment: #t=12.5
  const linked = /^#t=([0-9]+([.][0-9]+)?)$/.exec(location.hash);
  if (linked) state.now = Number(linked[1]) * 1000;
  seek(state.now);
})();
