"use strict";
// Leafs through a cache. What rows say only ever becomes text of the page, never a part of it.
const packtool = (() => {
  const MOST_BLOCKS = 400, ON_A_PAGE = 25;
  const blocks = new Map();
  const find = (id) => document.getElementById(id);
  const state = { view: "samples", page: 0, query: "", searching: 0 };
  let cache, dropped, detail, entries = [];

  function make(tag, properties = {}, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  }

  // A part of the data: a script that calls `give` with it.
  function load(name) {
    if (blocks.has(name)) return Promise.resolve(blocks.get(name));
    return new Promise((resolve, reject) => {
      const script = make("script", { src: `data/${name}.js` });
      script.onload = () => { script.remove(); resolve(blocks.get(name)); };
      script.onerror = () => { script.remove(); reject(new Error(`data/${name}.js cannot be read`)); };
      document.head.append(script);
    });
  }

  function give(name, value) {
    blocks.set(name, value);
    if (blocks.size > MOST_BLOCKS) blocks.delete(blocks.keys().next().value);
  }

  const numbers = (text) => new Int32Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
  const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
  const inBlock = async (kind, place) =>
    (await load(`${kind}-${Math.floor(place / cache.inABlock)}`))[place % cache.inABlock];
  const value = (name) => find("filters").elements[name]?.value ?? "";
  const tell = (text) => { find("told").textContent = text; };
  const saidBy = (sample) => sample.parts.map((part) => part.look === "truncated" ? "" : part.text).join("");

  function field(label, control) {
    return make("label", {}, label, control);
  }

  function choice(name, options) {
    return make("select", { name }, ...options.map(([key, text]) => make("option", { value: key, textContent: text })));
  }

  const FILTERS = {
    samples: () => [
      field("Text", make("input", { name: "text", type: "search" })),
      field("Channel", choice("channel", [["", "all"], ...cache.channels.map((name, i) => [i, name]), [-1, "none"]])),
      field("Media", choice("media", [["", "any"], [1, "images"], [2, "videos"], [4, "audio"], [0, "none"]])),
      field("Minimum tokens", make("input", { name: "least", type: "number", min: 0 })),
      field("Maximum tokens", make("input", { name: "most", type: "number", min: 0 })),
      ...(cache.losses ? [field("Loss", choice("loss", [["", "any"],
        ...cache.losses.titles.map((title, i) => [1 << i, title])]))] : []),
      field("Order", choice("order", [...(cache.losses ? [["loss", "highest loss first"]] : []), ["", "by number"], ["down", "longest first"], ["up", "shortest first"]])),
    ],
    dropped: () => [
      field("Text", make("input", { name: "text", type: "search" })),
      field("Reason", choice("reason", [["", "all"],
        ...Object.entries(cache.dropped).map(([reason, number]) => [reason, `${reason} (${number.toLocaleString("en")})`])])),
    ],
    packs: () => cache.packs.ranks ? [
      field("Step", make("input", { name: "step", type: "number", min: 0 })),
      field("Rank", make("input", { name: "rank", type: "number", min: 0, max: cache.packs.ranks - 1 })),
    ] : [],
  };

  // Which samples pass the filters that need no text; places in `cache.numbers`.
  function passing() {
    const channel = value("channel"), media = value("media"), loss = Number(value("loss"));
    const least = Number(value("least")), most = Number(value("most")) || Infinity;
    const found = [];
    for (let i = 0; i < cache.numbers.length; i++) {
      if (loss && !(cache.losses.groups[i] & loss)) continue;
      if (channel !== "" && cache.channel[i] !== Number(channel)) continue;
      if (media !== "" && (media === "0" ? cache.kinds[i] !== 0 : !(cache.kinds[i] & Number(media)))) continue;
      if (cache.lengths[i] >= least && cache.lengths[i] <= most) found.push(i);
    }
    if (value("order") === "loss") return found.sort((a, b) => lastLoss(b) - lastLoss(a) || a - b);
    const sign = { up: 1, down: -1 }[value("order")];
    return sign ? found.sort((a, b) => sign * (cache.lengths[a] - cache.lengths[b]) || a - b) : found;
  }

  async function filterSamples() {
    const search = ++state.searching, text = value("text").toLowerCase(), candidates = passing();
    const of = cache.numbers.length < cache.total ? `, of ${count(cache.total, "sample")} in all` : "";
    state.query = text;
    if (!text) {
      entries = candidates;
      tell(`${count(entries.length, "sample")} of ${cache.numbers.length.toLocaleString("en")} on these pages${of}.`);
      return show();
    }
    entries = [];
    let looked = 0, shown = 0;
    for (const place of candidates) {
      const sample = await inBlock("samples", place);
      if (search !== state.searching) return;
      if (`${sample.source} ${saidBy(sample)}`.toLowerCase().includes(text)) entries.push(place);
      if (++looked % 200 && looked !== candidates.length) continue;
      tell(`${count(entries.length, "sample")} with this text, ${looked.toLocaleString("en")} of ` +
        `${count(candidates.length, "sample")} searched${of}.`);
      if (entries.length !== shown && shown < ON_A_PAGE * (state.page + 1)) await show();
      shown = entries.length;
    }
    return show();
  }

  async function filter() {
    state.page = 0;
    if (state.view === "samples") return filterSamples();
    state.searching++;
    if (state.view === "packs") return filterPacks();
    const text = value("text").toLowerCase(), reason = value("reason");
    entries = dropped.filter((row) => (!reason || row.reason === reason) &&
      `${row.source} ${row.row} ${row.detail}`.toLowerCase().includes(text));
    const all = Object.values(cache.dropped).reduce((a, b) => a + b, 0);
    const listed = dropped.length < all ? `; the first ${dropped.length.toLocaleString("en")} are listed` : "";
    tell(`${count(entries.length, "row")} shown; ${count(all, "row")} were dropped${listed}.`);
    return show();
  }

  function filterPacks() {
    const { shown, all, capacity, sharesPrefixes, ranks, places } = cache.packs;
    const step = value("step"), rank = value("rank");
    entries = Array.from({ length: shown }, (_, i) => i).filter((i) =>
      (step === "" || places[0][i] === Number(step)) && (rank === "" || places[1][i] === Number(rank) || places[1][i] < 0));
    const of = entries.length < all ? ` of ${all.toLocaleString("en")}` : "";
    tell(`${count(entries.length, "pack")}${of}, of at most ${count(capacity, "token")} each.` +
      (ranks ? "" : " This plan has no steps and ranks; make it again with packtool plan --save.") +
      (sharesPrefixes ? " Gray blocks are prefixes that several samples share." : ""));
    return show();
  }

  // A step of the plan, for the line above the first of its packs.
  function stepHead(step) {
    const { steps, places, ranks } = cache.packs, at = search(steps.number, step);
    const [packs, micro, tokens, least, most] =
      ["packs", "microBatches", "tokens", "least", "most"].map((name) => steps[name][at]);
    const shown = places[0].filter((each) => each === step).length;
    const each = ranks > 1 ? `; ${ranks.toLocaleString("en")} ranks of ` +
      `${least === most ? "" : `${least.toLocaleString("en")} to `}${count(most, "token")}` : "";
    const told = `${count(packs, "pack")}, ${count(tokens, "token")}${each}, in ` +
      `${micro === 1 ? "one micro-batch" : `${micro.toLocaleString("en")} micro-batches`}` +
      (shown < packs ? `; ${count(shown, "pack")} shown` : "");
    return make("div", { className: "step" }, make("h3", { textContent: `Step ${step.toLocaleString("en")}` }),
      make("p", { className: "note", textContent: `${told}.` }));
  }

  // Where a pack or a sample is trained, in words.
  function trainedAt(step, rank, micro) {
    if (rank < 0) return `step ${step.toLocaleString("en")}, several ranks`;
    const of = micro < 0 ? "several micro-batches" : `micro-batch ${micro.toLocaleString("en")}`;
    return `step ${step.toLocaleString("en")}, rank ${rank.toLocaleString("en")}, ${of}`;
  }

  const lastLoss = (place) => cache.losses.epochs.reduce((last, losses) => losses[place] < 0 ? last : losses[place], -1);

  // The losses of a sample in each epoch, in nats per token.
  const lossesOf = (place) =>
    cache.losses.epochs.map((losses) => losses[place] < 0 ? "–" : (losses[place] / 1000).toFixed(3)).join(" → ");

  const SHOWN = {
    async samples(place) {
      const sample = await inBlock("samples", place);
      const entry = make("button", { type: "button", className: "entry", ariaExpanded: "false",
        onclick: () => entry.ariaExpanded === "true" ? close() : open(place, entry) },
        make("span", { className: "thumb" }, ...thumbnail(sample)),
        make("b", { textContent: `sample ${sample.number.toLocaleString("en")}` }),
        make("span", { className: "said", textContent: saidBy(sample).replace(/<\|[^|>]*\|>/g, " ").slice(0, 300) }),
        make("span", { textContent: count(sample.tokens, "token") + (cache.losses ? `, loss ${lossesOf(place)}` : "") }));
      entry.dataset.place = place;
      return entry;
    },
    async dropped(row) {
      return make("div", { className: "entry row" },
        make("b", { textContent: row.reason }),
        make("span", { textContent: row.detail }),
        make("span", { className: "said", textContent: `${row.source}, row ${row.row}` }));
    },
    async packs(place, i, page) {
      const pack = await inBlock("packs", place), { capacity, places } = cache.packs;
      const used = pack.parts.reduce((sum, [, length]) => sum + length, 0);
      const bar = make("div", { className: "pack" }, ...pack.parts.map(([number, length, num], i) => {
        if (number === null) {
          const told = `prefix of ${count(num, "sample")}, ${count(length, "token")}, computed once`;
          const shared = make("i", { className: "prefix", title: told });
          shared.style.width = `${100 * length / capacity}%`;
          return shared;
        }
        const told = `sample ${number}, ${count(length, "token")}`;
        const at = placeOf(number);
        const part = make("button", { type: "button", className: `c${i % 5}`, title: told, ariaLabel: told, disabled: at < 0,
          onclick: () => open(at, bar) });
        part.style.width = `${100 * length / capacity}%`;
        return part;
      }));
      const head = `pack ${pack.number.toLocaleString("en")}: ${count(pack.samples, "sample")}, ` +
        `${count(used, "token")}, fill ${(100 * used / capacity).toFixed(1)}%`;
      if (!places.length) return make("div", {}, make("h3", { textContent: head }), bar);
      const [step, rank, micro] = places.map((column) => column[place]);
      const begins = i === 0 || places[0][page[i - 1]] !== step;
      return make("div", {}, ...(begins ? [stepHead(step)] : []),
        make("h4", { textContent: `${trainedAt(step, rank, micro).replace(/^[^,]*, /, "")}, ${head}` }), bar);
    },
  };

  // Where a number stands among ascending ones; -1 if it does not.
  function search(numbers, number) {
    let low = 0, high = numbers.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (numbers[middle] < number) low = middle + 1; else high = middle;
    }
    return numbers[low] === number ? low : -1;
  }

  const placeOf = (number) => search(cache.numbers, number);

  let drawn = 0;
  async function show() {
    const drawing = ++drawn, start = state.page * ON_A_PAGE, last = Math.max(Math.ceil(entries.length / ON_A_PAGE) - 1, 0);
    const lines = await Promise.all(entries.slice(start, start + ON_A_PAGE).map(SHOWN[state.view]));
    if (drawing !== drawn) return;
    const line = detail.hidden ? undefined : lines.find((each) => each.dataset.place === detail.dataset.place);
    if (!line) close();
    find("list").replaceChildren(...lines);
    if (line) attach(line);
    const turn = (text, page) => make("button", { type: "button", textContent: text, disabled: page < 0 || page > last,
      onclick: () => { state.page = page; show().catch(fail); } });
    find("pager").replaceChildren(turn("Previous", state.page - 1),
      `page ${(state.page + 1).toLocaleString("en")} of ${(last + 1).toLocaleString("en")}`, turn("Next", state.page + 1));
  }

  const SVG = "http://www.w3.org/2000/svg";

  // A picture with the places in it that the text tells: outlines, and the number that each has in the list below.
  function seen(image, { regions, ratio }) {
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", "0 0 1 1");
    svg.setAttribute("preserveAspectRatio", "none");
    const badges = regions.map(({ corners, isCertain }, i) => {
      const [[left, top], last] = [corners[0], corners.at(-1)];
      const drawn = { 1: [last, last], 2: [[left, top], [last[0], top], last, [left, last[1]]] }[corners.length] ?? corners;
      const outline = document.createElementNS(SVG, "polygon");
      outline.setAttribute("points", drawn.map((corner) => corner.join()).join(" "));
      outline.setAttribute("class", `l${i % 5}${isCertain ? "" : " unsure"}${corners.length === 1 ? " point" : ""}`);
      svg.append(outline);
      const badge = make("b", { className: `c${i % 5}`, textContent: i + 1 });
      badge.style.left = `${100 * left}%`;
      badge.style.top = `${100 * top}%`;
      return badge;
    });
    const place = make("div", { className: "seen" }, image, svg, ...badges);
    place.style.setProperty("--ratio", ratio);
    return place;
  }

  function medium(part) {
    const caption = make("figcaption", { textContent: part.text });
    const figure = make("figure", {}, caption);
    const regions = part.regions ?? [];
    if (regions.length) figure.append(make("ol", {}, ...regions.map(({ told }) => make("li", { textContent: told }))));
    const unreadable = (element) => () => {
      (element.closest(".seen") ?? element).remove();
      if (!figure.querySelector("img, video, audio")) caption.textContent += " It cannot be shown: the file is unreadable or too large.";
    };
    const add = (tag, properties) => {
      const element = make(tag, properties);
      element.onerror = unreadable(element);
      figure.prepend(tag === "img" && regions.length ? seen(element, part) : element);
    };
    if (part.seen) add("img", { src: part.seen, alt: part.text, loading: "lazy" });
    if (part.played) add(part.seen ? "video" : "audio", { src: part.played, controls: true, preload: "metadata" });
    return figure;
  }

  // A thumbnail of the first image of a sample, for its line in the list.
  function thumbnail(sample) {
    const part = sample.parts.find((each) => each.seen);
    return part ? [make("img", { src: part.seen, alt: "", loading: "lazy", onerror: (event) => event.target.remove() })] : [];
  }

  // Put the open sample below its line.
  function attach(line) {
    line.after(detail);
    line.ariaExpanded = "true";
  }

  function close() {
    if (detail.previousElementSibling?.ariaExpanded) detail.previousElementSibling.ariaExpanded = "false";
    detail.hidden = true;
    find("list").after(detail);
  }

  // The text, with what was searched for marked.
  function marked(text) {
    if (!state.query) return [text];
    const found = [], lower = text.toLowerCase();
    let at = 0;
    for (let next; (next = lower.indexOf(state.query, at)) >= 0; at = next + state.query.length) {
      found.push(text.slice(at, next),
        make("span", { className: "found", textContent: text.slice(next, next + state.query.length) }));
    }
    return [...found, text.slice(at)];
  }

  async function open(place, line) {
    const sample = await inBlock("samples", place);
    close();
    const facts = [["row", `${sample.source}, row ${sample.row}${sample.part}`], ["channel", sample.channel ?? "none"],
      ["tokens", `${sample.tokens.toLocaleString("en")}, ${sample.trained.toLocaleString("en")} of them trained`]];
    if (cache.packs) {
      const [pack, ...at] = sample.place ?? [];
      facts.push(["in the plan", !sample.place ? "not in the plan: too long, or not drawn" :
        `${at.length ? `${trainedAt(...at)}, ` : ""}pack ${pack.toLocaleString("en")}`]);
    }
    if (cache.losses) facts.push(["loss in each epoch", lossesOf(place)]);
    if (sample.truncated) facts.push(["truncated", count(sample.truncated, "token")]);
    const text = make("div", { id: "text" });
    for (const part of sample.parts) {
      if (part.look === "media") { text.append(medium(part)); continue; }
      if (part.weight) text.append(make("span", { className: "weight", textContent: `×${part.weight}` }));
      text.append(make("span", { className: part.look }, ...marked(part.text)));
    }
    detail.replaceChildren(
      make("h2", { textContent: `Sample ${sample.number.toLocaleString("en")}` }),
      make("dl", {}, ...facts.map(([what, told]) =>
        make("div", {}, make("dt", { textContent: what }), make("dd", { textContent: told })))),
      make("p", { className: "note", textContent: "Colored text is trained; gray text is not." + (sample.truncated ?
        " Truncated text is not in the cache; a mark shows where it was, with its number of tokens." : "") }), text);
    detail.dataset.place = place;
    detail.hidden = false;
    attach(line);
    history.replaceState(null, "", `#sample=${sample.number}`);
    line.scrollIntoView({ block: "start" });
  }

  function view(name) {
    state.view = name;
    for (const button of find("views").children) button.ariaPressed = String(button.value === name);
    find("filters").replaceChildren(...FILTERS[name]());
    close();
    return filter().catch(fail);
  }

  const fail = (error) => tell(`${error.message}.`);

  let typed;
  async function start() {
    cache = await load("cache");
    detail = find("detail");
    for (const name of ["numbers", "lengths", "channel", "kinds"]) cache[name] = numbers(cache[name]);
    if (cache.losses) {
      cache.losses.groups = numbers(cache.losses.groups);
      cache.losses.epochs = cache.losses.epochs.map(numbers);
    }
    if (cache.packs) {
      cache.packs.places = cache.packs.places.map(numbers);
      for (const name of Object.keys(cache.packs.steps)) cache.packs.steps[name] = numbers(cache.packs.steps[name]);
    }
    dropped = await load("dropped");
    const packs = cache.packs && { packs: cache.packs.ranks ? "Steps and packs" : "Packs" };
    const names = { samples: "Samples", dropped: "Dropped rows", ...packs };
    find("views").replaceChildren(...Object.entries(names).map(([name, textContent]) =>
      make("button", { type: "button", value: name, textContent, onclick: () => view(name) })));
    find("filters").onsubmit = (event) => event.preventDefault();
    find("filters").oninput = () => { clearTimeout(typed); typed = setTimeout(() => filter().catch(fail), 200); };
    find("list").className = cache.kinds.some((kinds) => kinds & 3) ? "pictures" : "";
    await view("samples");
    const asked = /^#sample=(\d+)$/.exec(location.hash);
    const place = asked ? placeOf(Number(asked[1])) : -1;
    if (place < 0) return;
    state.page = Math.floor(entries.indexOf(place) / ON_A_PAGE);
    await show();
    await open(place, find("list").querySelector(`[data-place="${place}"]`));
  }

  addEventListener("DOMContentLoaded", () => start().catch(fail));
  return { give };
})();
