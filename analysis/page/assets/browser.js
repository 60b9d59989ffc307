"use strict";
// The question browser. All texts come from data sets and models: they are only ever set as text (textContent), never as mark-up.
(async () => {
  const byId = (id) => document.getElementById(id);
  const box = byId("browser"), list = byId("list"), detail = byId("detail"), search = byId("search");
  const order = byId("order"), found = byId("found"), chips = [...document.querySelectorAll(".chip")];
  const PAGE = 60; // list entries added at a time
  const FIRST = 3000; // characters of a text shown before "show all"
  // In the order of the data: name, significant digits (0: a whole number), and what the lowest of a pool is called.
  const MEASURES = [["SPS", 5, "lowest"], ["PPL", 4, "lowest"], ["LongPPL", 4, "lowest"], ["tokens", 0, "fewest"]];

  const unpack = async () => {
    const packed = atob(byId("data").textContent);
    const bytes = new Uint8Array(packed.length);
    for (let at = 0; at < packed.length; at++) bytes[at] = packed.charCodeAt(at);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  };

  let data;
  try {
    data = await unpack();
  } catch (error) {
    found.textContent = `The questions cannot be unpacked here (${error}); a browser of 2023 or newer can.`;
    return;
  }
  byId("data").remove();
  const questions = data.questions;
  let shown = [], current = -1, pattern = null;

  /** An element with attributes and children; strings become text. */
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === true) element.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children.flat(2).filter((child) => child !== null && child !== undefined));
    return element;
  };
  const number = (value, digits) => value === null ? "–"
    : Math.abs(value) >= 1e6 ? value.toExponential(2)
    : value.toLocaleString("en", digits ? { minimumSignificantDigits: digits, maximumSignificantDigits: digits } : {});
  const signed = (value) => (value > 0 ? "+" : value < 0 ? "−" : "±") + Math.abs(value).toFixed(0);
  const sps = (question) => Math.max(0, question.c.findIndex((candidate) => candidate.w.includes("lowest_sps")));
  const gain = (question) => {
    const chosen = question.c[sps(question)], initial = question.c[0];
    return chosen && chosen.f !== null && initial.f !== null ? chosen.f - initial.f : 0;
  };

  // ---- finding

  const haystack = (question) => question.h ??= [
    question.q, question.i, question.t, ...question.a, question.r[0], question.b[0],
    ...question.c.flatMap((candidate) => [candidate.s, candidate.y]), ...(question.z ?? []).slice(0, 2), ...question.p.flatMap((passage) => [passage[0], passage[1]]),
  ].join("\n").toLowerCase();

  const find = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const flags = chips.filter((chip) => chip.getAttribute("aria-pressed") === "true").map((chip) => chip.dataset.flag);
    shown = [];
    questions.forEach((question, at) => {
      if (!flags.every((flag) => question.f.includes(flag))) return;
      if (words.length && !words.every((word) => haystack(question).includes(word))) return;
      shown.push(at);
    });
    if (order.value !== "data") {
      const sign = order.value === "gain" ? -1 : 1;
      shown.sort((a, b) => sign * (gain(questions[a]) - gain(questions[b])) || a - b);
    }
    pattern = words.length ? new RegExp(words.map(escape).join("|"), "giu") : null;
    found.textContent = `${shown.length.toLocaleString("en")} of ${questions.length.toLocaleString("en")} questions`;
    list.replaceChildren();
    list.scrollTop = 0;
    more();
  };

  const more = () => {
    list.querySelector(".more")?.remove();
    const start = list.children.length;
    list.append(...shown.slice(start, start + PAGE).map(entry));
    if (list.children.length < shown.length) {
      const button = make("button", { type: "button" }, `${(shown.length - list.children.length).toLocaleString("en")} more`);
      button.addEventListener("click", () => { more(); list.children[start + PAGE]?.querySelector("a")?.focus(); });
      list.append(make("li", { class: "more" }, button));
    }
  };

  const entry = (at) => {
    const question = questions[at], chosen = sps(question);
    const right = question.c.filter((candidate) => candidate.e === 100).length;
    const boxes = question.c.map((candidate, k) => make("i", {
      class: `${candidate.e === 100 ? "right" : candidate.e === null ? "unknown" : "wrong"}${k === chosen ? " chosen" : ""}` }));
    const change = gain(question);
    const words = question.a.length ? `${right} of ${question.c.length} right` : "no gold answer";
    const link = make("a", { href: `#q${at + 1}`, "data-at": at, "aria-current": at === current ? "true" : null },
      make("span", { class: "text", dir: "auto" }, question.q.slice(0, 400) || "(no text)"),
      make("span", { class: "squares", "aria-hidden": "true" }, boxes),
      make("span", { class: "state" }, words,
        change ? make("b", { class: change > 0 ? "up" : "down" }, ` · SPS ${signed(change)} F1`) : null));
    return make("li", {}, link);
  };

  // ---- marking

  const escape = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");

  const goldPattern = (question) => {
    const golds = question.a.map((gold) => gold.trim()).filter((gold) => gold && gold.length <= 300
      && !/^(yes|no|noanswer)$/i.test(gold)).slice(0, 200).sort((a, b) => b.length - a.length);
    if (!golds.length) return null;
    const words = golds.map((gold) => gold.split(/\s+/).map(escape).join("\\s+"));
    return new RegExp(`(?<![\\p{L}\\p{N}])(?:${words.join("|")})(?![\\p{L}\\p{N}])`, "giu");
  };

  /** Ranges [start, end] of a pattern in a text. */
  const ranges = (regex, text) => {
    const out = [];
    if (regex) for (const match of text.matchAll(regex)) if (match[0]) out.push([match.index, match.index + match[0].length]);
    return out;
  };

  /** The text as nodes with gold answers marked, and search hits where no gold answer stands. */
  const marked = (text, gold) => {
    const spans = ranges(gold, text).map(([a, b]) => [a, b, "gold"]);
    for (const [a, b] of ranges(pattern, text)) if (!spans.some(([c, d]) => a < d && c < b)) spans.push([a, b, "hit"]);
    spans.sort((a, b) => a[0] - b[0]);
    const nodes = [];
    let at = 0;
    for (const [a, b, kind] of spans) {
      if (a > at) nodes.push(text.slice(at, a));
      nodes.push(make("mark", { class: kind }, text.slice(a, b)));
      at = b;
    }
    nodes.push(text.slice(at));
    return nodes;
  };

  /** A block of untrusted text: isolated for writing direction, long ones cut with a button that shows the rest. */
  const block = (text, gold, className) => {
    const element = make("div", { class: `prose ${className}`, dir: "auto" });
    if (!text.trim()) {
      element.append(make("em", {}, "(blank)"));
      return element;
    }
    let end = FIRST;
    if (text.length > FIRST * 1.2) {
      const code = text.charCodeAt(end - 1);
      if (code >= 0xd800 && code < 0xdc00) end -= 1; // not through a surrogate pair
      element.append(...marked(text.slice(0, end), gold), "…");
      const button = make("button", { type: "button", class: "all" }, `Show all ${text.length.toLocaleString("en")} characters`);
      button.addEventListener("click", () => element.replaceChildren(...marked(text, gold)));
      return make("div", {}, element, button);
    }
    element.append(...marked(text, gold));
    return element;
  };

  // ---- one question

  const score = (em, f1) => em === null ? make("span", { class: "score unknown" }, "no gold answer")
    : make("span", { class: `score ${em === 100 ? "right" : "wrong"}` },
      make("span", { "aria-hidden": "true" }, em === 100 ? "✓ " : "✗ "), `EM ${em.toFixed(0)} · F1 ${f1.toFixed(0)}`);

  const answer = (text, em, f1, gold) => make("p", { class: "answer" },
    make("bdi", { class: "said" }, text ? marked(text, gold) : make("em", {}, "(blank)")), " ", score(em, f1));

  const measures = (question, candidate) => make("dl", { class: "measures" }, MEASURES.map(([name, digits, word], m) => {
    const values = question.c.map((other) => other.m[m]).filter((value) => value !== null);
    const value = candidate.m[m], low = Math.min(...values), high = Math.max(...values);
    const best = value !== null && value === low && high > low;
    const share = value === null || high === low ? 0 : Math.round(100 * (value - low) / (high - low));
    const bar = make("span", { class: "place", "aria-hidden": "true" }, make("i"));
    bar.firstChild.style.insetInlineStart = `${share}%`;
    return make("div", { class: best ? "best" : null }, make("dt", {}, name),
      make("dd", {}, number(value, digits), best ? make("span", { class: "lowest" }, ` ${word}`) : null, value === null ? null : bar));
  }));

  const candidateCard = (question, candidate, k, gold) => {
    const title = k === 0 ? "Initial summary" : `Sample ${k}`;
    const same = question.c.findIndex((other) => other.s === candidate.s);
    const chosen = candidate.w.map((name) => make("span", { class: `by${name === "lowest_sps" ? " sps" : ""}` }, data.labels[name] ?? name));
    const notes = [];
    if (candidate.o[1]) notes.push(`${candidate.o[1]} of ${candidate.o[0]} rounds cut off`);
    if (candidate.o[2]) notes.push("answer cut off");
    if (same < k) notes.push(`same text as ${same === 0 ? "the initial summary" : `sample ${same}`}`);
    return make("section", { class: `candidate${candidate.w.includes("lowest_sps") ? " chosen" : ""}`, "aria-label": title },
      make("h4", {}, title, notes.length ? make("span", { class: "note" }, notes.join(" · ")) : null),
      answer(candidate.y, candidate.e, candidate.f, gold),
      measures(question, candidate),
      block(candidate.s, gold, "summary"),
      make("p", { class: "chosen-by" }, make("span", { class: "note" }, chosen.length ? "chosen by" : "chosen by no rule"), ...chosen));
  };

  const stepwiseCard = ([summary, said, em, f1], gold) => make("section", { class: "candidate", "aria-label": "Stepwise" },
    make("h4", {}, "Stepwise", make("span", { class: "note" }, "chosen in every round; not of this pool")),
    answer(said, em, f1, gold), block(summary, gold, "summary"));

  const passages = (question, gold) => {
    const items = question.p.map(([title, text, evidence], at) => {
      const hits = ranges(gold, text).length;
      const folded = make("details", {}, make("summary", {}, make("span", { class: "rank" }, `${at + 1}`), " ",
        make("bdi", {}, marked(title || "(no title)", gold)),
        evidence ? make("span", { class: "tag" }, "evidence") : null,
        hits ? make("span", { class: "tag gold" }, `answer ×${hits}`) : null));
      folded.addEventListener("toggle", () => { // the text is made when it is first unfolded
        if (folded.open && folded.children.length === 1) folded.append(block(text, gold, "passage"));
      });
      return folded;
    });
    const button = make("button", { type: "button" }, "Unfold all");
    button.addEventListener("click", () => {
      const open = button.textContent === "Unfold all";
      items.forEach((item) => { item.open = open; });
      button.textContent = open ? "Fold all" : "Unfold all";
    });
    return make("section", { class: "passages", "aria-label": "Passages" },
      make("h4", {}, `${items.length} passages, in retrieval order `, items.length ? button : null), ...items);
  };

  const open = (at, focus) => {
    current = at;
    // Only what the reader opened is named in the address.
    if (focus && location.hash !== `#q${at + 1}`) history.replaceState(null, "", `#q${at + 1}`);
    const question = questions[at], gold = goldPattern(question);
    const [ratio, skipped] = question.g;
    const place = shown.indexOf(at);
    const back = make("button", { type: "button", class: "back" }, "← List");
    back.addEventListener("click", close);
    const previous = make("button", { type: "button", disabled: place <= 0 }, "Previous");
    const next = make("button", { type: "button", disabled: place < 0 || place >= shown.length - 1 }, "Next");
    previous.addEventListener("click", () => move(-1));
    next.addEventListener("click", () => move(1));
    const golds = question.a.length
      ? question.a.map((text) => make("bdi", { class: "gold-answer" }, text))
      : [make("em", {}, "none: this question is in no mean")];
    detail.replaceChildren(
      make("div", { class: "walk" }, back, make("span", { class: "note" }, place < 0 ? "not in the list"
        : `${(place + 1).toLocaleString("en")} of ${shown.length.toLocaleString("en")}`, " · ", make("bdi", {}, question.i),
        question.t ? [" · ", make("bdi", {}, question.t)] : null), previous, next),
      make("h3", { dir: "auto" }, marked(question.q, null)),
      make("p", { class: "golds" }, make("span", { class: "note" }, "Gold answer"), ...golds),
      make("dl", { class: "without" },
        make("div", {}, make("dt", {}, "Raw passages"), make("dd", {}, answer(question.r[0], question.r[1], question.r[2], gold))),
        make("div", {}, make("dt", {}, "Closed book"), make("dd", {}, answer(question.b[0], question.b[1], question.b[2], gold))),
        make("div", {}, make("dt", {}, "Gate"), make("dd", {}, skipped === null ? "none"
          : skipped ? "keeps the initial summary, no sampling" : "samples", ratio === null ? null
          : make("span", { class: "note" }, ` ratio ${number(ratio, 4)}`)))),
      make("div", { class: "candidates" }, question.c.map((candidate, k) => candidateCard(question, candidate, k, gold)),
        question.z ? stepwiseCard(question.z, gold) : null),
      passages(question, gold));
    box.dataset.view = "detail";
    for (const link of list.querySelectorAll("a[aria-current]")) link.removeAttribute("aria-current");
    const link = list.querySelector(`a[data-at="${at}"]`);
    link?.setAttribute("aria-current", "true");
    if (link && list.offsetParent) {
      const row = link.parentElement;
      if (row.offsetTop < list.scrollTop) list.scrollTop = row.offsetTop;
      else if (row.offsetTop + row.offsetHeight > list.scrollTop + list.clientHeight) list.scrollTop = row.offsetTop + row.offsetHeight - list.clientHeight;
    }
    if (focus) {
      detail.focus({ preventScroll: true });
      if (detail.getBoundingClientRect().top < 0 || !list.offsetParent) detail.scrollIntoView({ block: "start" });
    }
  };

  const close = () => {
    box.dataset.view = "list";
    (list.querySelector(`a[data-at="${current}"]`) ?? search).focus();
  };

  const move = (step) => {
    const place = shown.indexOf(current), target = place < 0 ? 0 : place + step;
    if (!(target in shown)) return;
    while (list.querySelectorAll("a").length <= target && list.querySelector(".more")) more();
    open(shown[target], true);
  };

  // ---- events

  list.addEventListener("click", (event) => {
    const link = event.target.closest("a");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    open(Number(link.dataset.at), true);
  });
  list.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const row = event.target.closest("li");
    if (!step || !row) return;
    const target = step > 0 ? row.nextElementSibling : row.previousElementSibling;
    event.preventDefault();
    (target?.querySelector("a, button") ?? (step < 0 ? search : null))?.focus();
  });
  search.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowDown") return;
    event.preventDefault();
    list.querySelector("a")?.focus();
  });
  // Single keys act only while the focus is in the browser, so they never get in the way of assistive technology.
  box.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const typing = event.target.matches("input, select");
    if (event.key === "Escape") {
      if (event.target === search && search.value) return;
      if (box.dataset.view === "detail" && detail.contains(event.target)) close();
    } else if (!typing && event.key === "/") {
      event.preventDefault();
      box.dataset.view = "list";
      search.focus();
    } else if (!typing && (event.key === "j" || event.key === "k")) {
      event.preventDefault();
      move(event.key === "j" ? 1 : -1);
    }
  });
  let waiting = 0;
  search.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(find, 120);
  });
  order.addEventListener("change", find);
  for (const chip of chips) {
    chip.addEventListener("click", () => {
      chip.setAttribute("aria-pressed", chip.getAttribute("aria-pressed") !== "true");
      find();
    });
  }
  const follow = (focus) => {
    const at = Number(/^#q(\d+)$/.exec(location.hash)?.[1] ?? 0) - 1;
    if (!(at in questions)) return false;
    open(at, focus);
    return true;
  };
  addEventListener("hashchange", () => follow(true));

  for (const control of [search, order, ...chips]) control.disabled = false;
  find();
  performance.mark("questions-ready");
  if (follow(true)) return;
  if (matchMedia("(min-width: 60rem)").matches && shown.length) { // room for both: never an empty pane
    open(shown[0], false);
    box.dataset.view = "list";
  }
})();
