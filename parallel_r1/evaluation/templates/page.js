"use strict";
(() => {
  const TAGS = ["<Parallel>", "</Parallel>", "<Path>", "</Path>", "<Summary>", "</Summary>"];
  const FIRST_CHARS = 6000;
  const FIRST_TOKENS = 1500;
  const MOST_SPANS = 20000;
  const FIRST_CARDS = 16;
  const FIRST_GROUPS = 150;
  const WORDS = { right: "✓ right", wrong: "✕ wrong", cut: "… cut" };
  const MARKS = { right: "✓", wrong: "✕", cut: "…" };
  // what has no shape of its own or turns the order of its neighbours: shown by its number
  const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u115f\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

  const id = (name) => document.getElementById(name);

  // ---------------------------------------------------------------- theme

  const themes = ["auto", "light", "dark"];
  let theme = "auto";
  const showTheme = () => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    id("theme").textContent = `Theme: ${theme}`;
  };
  id("theme").addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    showTheme();
  });
  showTheme();

  if (!id("rows")) return;
  const groups = JSON.parse(id("rows").textContent);

  // ---------------------------------------------------------------- text, never markup

  function make(tag, className, ...children) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    for (const child of children) if (child !== null && child !== undefined) node.append(child);
    return node;
  }

  function addText(node, text) {
    let at = 0;
    for (const match of text.matchAll(HIDDEN)) {
      if (match.index > at) node.append(text.slice(at, match.index));
      const code = match[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
      node.append(make("span", "ctl", `U+${code}`));
      at = match.index + match[0].length;
    }
    if (at < text.length) node.append(text.slice(at));
    return node;
  }

  const text = (tag, className, value) => addText(make(tag, className), String(value));

  function number(value) {
    if (typeof value !== "number") return String(value);
    return Number.isInteger(value) ? String(value) : value.toFixed(3);
  }

  // ---------------------------------------------------------------- responses as trees

  const textOf = (row) => {
    if (row.response === undefined) row.response = row.tokens.slice(0, row.tokens.length - row.extra).join("");
    return row.response;
  };

  // atoms: {text, logprob} token by token, or runs of plain text and tags
  function atomsOf(row, whole) {
    if (row.tokens) {
      const most = whole ? MOST_SPANS : FIRST_TOKENS;
      const shown = Math.min(row.tokens.length, most);
      const atoms = row.tokens.slice(0, shown).map((piece, i) => ({
        text: piece, logprob: row.logprobs[i], token: true, extra: i >= row.tokens.length - row.extra,
      }));
      const rest = row.tokens.slice(shown).join("");
      if (rest && whole) atoms.push(...split(rest));
      return [atoms, whole ? 0 : rest.length];
    }
    const all = textOf(row);
    const shown = whole ? all : all.slice(0, FIRST_CHARS);
    return [split(shown), all.length - shown.length];
  }

  const split = (value) => value.split(/(<\/?(?:Parallel|Path|Summary)>)/).filter(Boolean).map((part) => ({ text: part }));

  // The segments of structure/tokens.py: lenient, so that every response has a shape.
  function parse(atoms) {
    const parts = [];
    let main = null, block = null, lane = null, summary = null;
    const target = () => {
      if (lane) return lane.atoms;
      if (summary) return summary;
      if (block && block.open) return block.between;
      if (!main) { main = { kind: "main", atoms: [] }; parts.push(main); }
      return main.atoms;
    };
    for (const atom of atoms) {
      const tag = TAGS.indexOf(atom.text);
      if (tag === 0 && !(block && block.open)) {
        main = summary = null;
        block = { kind: "block", open: true, lanes: [], between: [], summary: null, tags: [atom] };
        parts.push(block);
      } else if (tag === 2 && block && block.open) {
        lane = { atoms: [], tags: [atom] };
        block.lanes.push(lane);
      } else if (tag === 3 && lane) {
        lane.tags.push(atom);
        lane = null;
      } else if (tag === 1 && block && block.open) {
        block.tags.push(atom);
        block.open = false;
        lane = null;
      } else if (tag === 4 && block && !block.open && !block.summary && !main) {
        summary = block.summary = [];
        block.tags.push(atom);
      } else if (tag === 5 && summary) {
        block.tags.push(atom);
        summary = null;
      } else {
        // white space between a block and its summary belongs to neither
        if (block && !block.open && !block.summary && !main && !atom.text.trim()) { block.tags.push(atom); continue; }
        target().push(atom);
      }
    }
    return parts;
  }

  const level = (logprob) => (logprob > -0.05 ? 0 : logprob > -0.5 ? 1 : logprob > -1.2 ? 2 : logprob > -2.3 ? 3 : logprob > -4 ? 4 : 5);

  // the word that stands for a tag, which carries the tag's log-probability
  function word(atom, value) {
    const node = text("span", "", value);
    if (atom && atom.token) mark(node, atom);
    return node;
  }

  function mark(node, atom) {
    const given = atom.logprob === null || atom.logprob === undefined;
    node.className = given ? "tok given" : `tok t${level(atom.logprob)}`;
    node.dataset.logprob = given ? "" : atom.logprob;
    return node;
  }

  function textBox(atoms, className) {
    const box = make("div", `text ${className || ""}`.trim());
    box.dir = "auto";
    for (const atom of trimmed(atoms)) {
      if (atom.extra) { box.append(text("span", "extra", ` ${atom.text}`)); continue; }
      if (!atom.token) { addText(box, atom.text); continue; }
      box.append(mark(text("span", "", atom.text), atom));
    }
    return box;
  }

  function bodyOf(row, whole) {
    const body = make("div", "body");
    const [atoms, left] = atomsOf(row, whole);
    if (row.tokens) {
      body.tabIndex = 0;
      body.setAttribute("role", "group");
      body.setAttribute("aria-label", "Text of the response; left and right arrow keys step through its tokens");
    }
    let number = 0;
    for (const part of parse(atoms)) {
      if (part.kind === "main") {
        if (part.atoms.some((atom) => atom.text.trim())) body.append(textBox(part.atoms, "main-text"));
        continue;
      }
      body.append(blockOf(part, row, number));
      number += 1;
    }
    if (left || row.left_out) {
      const rest = make("p", "rest");
      if (left) {
        const button = make("button", "", `Show all, ${left.toLocaleString("en")} characters more`);
        button.type = "button";
        button.addEventListener("click", () => {
          const all = bodyOf(row, true);
          body.replaceWith(all);
          (all.tabIndex === 0 ? all : all.closest(".card")).focus({ preventScroll: true });
        });
        rest.append(button);
      } else rest.append(`${row.left_out.toLocaleString("en")} characters more stand in the file of rows, not in this page.`);
      body.append(rest);
    } else if (row.verdict === "cut") body.append(make("p", "cut-here", "— cut here by the length limit —"));
    return body;
  }

  // white space at both ends only separates
  function trimmed(atoms) {
    let start = 0, end = atoms.length;
    while (start < end && !atoms[start].text.trim()) start += 1;
    while (end > start && !atoms[end - 1].text.trim()) end -= 1;
    const kept = atoms.slice(start, end);
    if (kept.length) kept[0] = { ...kept[0], text: kept[0].text.trimStart() };
    return kept;
  }

  function blockOf(part, row, number) {
    const block = make("div", "block");
    const facts = ["", `${part.lanes.length} ${part.lanes.length === 1 ? "path" : "paths"}`];
    const at = row.parallel_positions && row.parallel_positions[number];
    if (typeof at === "number") facts.push(`opens at ${Math.round(at * 100)} % of the response`);
    // labels are those of well-formed blocks: they fit where every block is
    const labels = row.block_labels || [];
    const label = labels.length === (row.parallel_positions || labels).length ? labels[number] : undefined;
    if (label) facts.push(String(label));
    block.append(make("p", "label", word(part.tags[0], `Block ${number + 1}`), addText(make("span"), facts.join(" · "))));
    if (part.between.some((atom) => atom.text.trim())) block.append(textBox(part.between));
    const lanes = make("div", "lanes");
    part.lanes.forEach((lane, i) => {
      const node = make("div", "lane", make("p", "label", word(lane.tags[0], `Path ${i + 1}`)), textBox(lane.atoms));
      node.style.setProperty("--lane", `var(--lane-${i % 6})`);
      lanes.append(node);
    });
    block.append(lanes);
    if (part.summary) {
      const opens = part.tags.find((atom) => atom.text === TAGS[4]);
      block.append(make("div", "summary", make("p", "label", word(opens, "Summary")), textBox(part.summary)));
    }
    if (!part.summary && !part.open) block.append(text("p", "label", "no summary"));
    return block;
  }

  // ---------------------------------------------------------------- a response, a group

  const fact = (name, value) => make("span", "fact", `${name} `, text("b", "", value));

  function cardOf(row, group) {
    const card = make("article", "card");
    card.tabIndex = -1;
    const head = make("header", "");
    const title = make("h3", "", text("span", `verdict v-${row.verdict}`, WORDS[row.verdict]));
    title.append(text("span", "", [row.mode, row.sample !== undefined ? `sample ${row.sample + 1}` : null].filter(Boolean).join(" · ") || "response"));
    head.append(title);
    if (row.final_answer !== undefined) head.append(fact("answers", String(row.final_answer).slice(0, 200)));
    if (row.reward !== undefined) head.append(fact("reward", number(row.reward)));
    if (row.advantage !== undefined) head.append(fact("advantage", (row.advantage > 0 ? "+" : "") + number(row.advantage)));
    if (row.total_tokens !== undefined) {
      const critical = row.critical_tokens !== undefined && row.critical_tokens !== row.total_tokens;
      head.append(fact("tokens", critical ? `${row.total_tokens}, ${row.critical_tokens} critical` : row.total_tokens));
    }
    if (row.agreement !== undefined) head.append(fact("paths agree", `${Math.round(row.agreement * 100)} %`));
    if (row.valid === false && row.verdict !== "cut") head.append(text("span", "fact", "broken structure"));
    const small = { ...row.terms, ...row.more };
    if (Object.keys(small).length) {
      const terms = make("div", "terms");
      for (const [name, value] of Object.entries(small)) {
        terms.append(fact(addText(make("span"), name.replaceAll("_", " ")).textContent, value === null ? "–" : String(number(value)).slice(0, 120)));
      }
      head.append(terms);
    }
    card.append(head, bodyOf(row, false));
    card.dataset.index = group.rows.indexOf(row);
    return card;
  }

  const where = (group) =>
    [group.stage, group.tier !== group.stage ? group.tier : null, group.iteration !== undefined ? `iteration ${group.iteration}` : null]
      .filter((part) => part !== undefined && part !== null && part !== "")
      .join(" · ");

  function showGroup(entry, focusRow) {
    const { group, rows } = entry;
    const detail = id("detail");
    const problem = make("div", "problem");
    const asks = text("p", "asks", group.question === undefined ? "" : group.question);
    asks.dir = "auto";
    problem.append(text("p", "where", [where(group), `problem ${group.id}`].filter(Boolean).join(" · ")), asks);
    if (group.answer !== undefined) problem.append(make("p", "gold", fact("gold answer", group.answer)));
    const cards = make("div", "cards");
    let shown = 0;
    const add = (most) => {
      const list = entry.whole ? group.rows : rows;
      for (; shown < Math.min(list.length, most); shown += 1) cards.append(cardOf(list[shown], group));
      more.hidden = shown >= list.length;
      more.textContent = `Show ${list.length - shown} more responses`;
    };
    const more = make("button", "quiet");
    more.type = "button";
    more.addEventListener("click", () => add(shown + FIRST_CARDS));
    if (rows.length < group.rows.length && !entry.whole) {
      const all = make("button", "quiet", `${rows.length} of ${group.rows.length} responses match; show all`);
      all.type = "button";
      all.addEventListener("click", () => showGroup({ ...entry, whole: true }));
      problem.append(make("p", "", all));
    }
    add(FIRST_CARDS);
    detail.replaceChildren(problem, cards, more);
    for (const button of id("groups").querySelectorAll("button")) {
      button.setAttribute("aria-current", String(Number(button.dataset.at) === state.at));
    }
    if (focusRow !== undefined) focusCard(focusRow < 0 ? cards.children.length - 1 : focusRow);
  }

  function focusCard(at) {
    const card = id("detail").querySelectorAll(".card")[at];
    if (!card) return;
    card.focus({ preventScroll: true });
    card.scrollIntoView({ block: "start" });
  }

  // ---------------------------------------------------------------- filters and the list

  const state = { at: 0, entries: [], listed: FIRST_GROUPS };
  const form = id("filters");

  for (const name of ["stage", "tier", "mode", "iteration"]) {
    const values = new Set();
    for (const group of groups) {
      if (name === "mode") for (const row of group.rows) values.add(row.mode);
      else values.add(group[name]);
    }
    values.delete(undefined);
    const select = form.elements[name];
    if (values.size < 2) { select.closest("label").hidden = true; continue; }
    const sorted = [...values];
    if (name === "iteration") sorted.sort((a, b) => a - b);
    for (const value of sorted) {
      const option = document.createElement("option");
      option.value = String(value);
      option.textContent = addText(make("span"), String(value)).textContent;
      select.append(option);
    }
  }

  function filtered() {
    const value = (name) => form.elements[name].value;
    const on = (name) => form.elements[name].checked;
    const query = value("q").trim().toLowerCase();
    const entries = [];
    for (const group of groups) {
      if (value("stage") && String(group.stage) !== value("stage")) continue;
      if (value("tier") && String(group.tier) !== value("tier")) continue;
      if (value("iteration") && String(group.iteration) !== value("iteration")) continue;
      const inHead = query && `${group.id} ${group.question} ${group.answer}`.toLowerCase().includes(query);
      const rows = group.rows.filter(
        (row) =>
          (!value("verdict") || row.verdict === value("verdict")) &&
          (!value("mode") || row.mode === value("mode")) &&
          (!on("disagree") || (row.agreement !== undefined && row.agreement < 1)) &&
          (!on("parallel") || row.parallel) &&
          (!on("invalid") || row.valid === false) &&
          (!query || inHead || textOf(row).toLowerCase().includes(query)),
      );
      if (rows.length) entries.push({ group, rows });
    }
    return entries;
  }

  function itemOf(entry, at) {
    const { group, rows } = entry;
    const marks = make("span", "marks");
    const kept = new Set(rows);
    for (const row of group.rows.slice(0, 16)) {
      const mark = make("span", `mark v-${row.verdict}${kept.has(row) ? "" : " off"}`, MARKS[row.verdict]);
      mark.setAttribute("aria-hidden", "true");
      marks.append(mark);
    }
    const right = group.rows.filter((row) => row.verdict === "right").length;
    const asks = text("span", "asks", String(group.question === undefined ? group.id : group.question).slice(0, 160));
    const button = make("button", "", text("span", "where", where(group)), asks, marks);
    button.append(make("span", "away", `${right} of ${group.rows.length} right`));
    button.type = "button";
    button.dataset.at = at;
    button.addEventListener("click", () => go(at));
    return make("li", "", button);
  }

  function list() {
    const items = state.entries.slice(0, state.listed).map(itemOf);
    id("groups").replaceChildren(...items);
    id("more-groups").hidden = state.entries.length <= state.listed;
  }

  function refresh() {
    state.entries = filtered();
    state.at = 0;
    state.listed = FIRST_GROUPS;
    list();
    const found = state.entries.reduce((sum, entry) => sum + entry.rows.length, 0);
    const all = groups.reduce((sum, group) => sum + group.rows.length, 0);
    id("count").textContent = `${found.toLocaleString("en")} of ${all.toLocaleString("en")} responses, ${state.entries.length.toLocaleString("en")} of ${groups.length.toLocaleString("en")} problems`;
    if (state.entries.length) showGroup(state.entries[0]);
    else id("detail").replaceChildren(make("p", "note", "No response passes these filters."));
    hideTip();
  }

  function go(at, focusRow) {
    if (at < 0 || at >= state.entries.length) return false;
    state.at = at;
    if (at >= state.listed) { state.listed = at + FIRST_GROUPS; list(); }
    showGroup(state.entries[at], focusRow);
    const button = id("groups").querySelector('[aria-current="true"]');
    const pane = button && button.closest(".list");
    if (pane) {
      const top = button.parentNode.offsetTop - pane.offsetTop;
      if (top < pane.scrollTop || top > pane.scrollTop + pane.clientHeight - 90) pane.scrollTop = top - 20;
    }
    hideTip();
    return true;
  }

  let waiting = 0;
  const refreshIn = (ms) => {
    clearTimeout(waiting);
    waiting = setTimeout(refresh, ms);
  };
  form.addEventListener("input", () => refreshIn(120));
  form.addEventListener("reset", () => refreshIn(0));  // once the controls have their values back
  form.addEventListener("submit", (event) => event.preventDefault());
  id("more-groups").addEventListener("click", () => { state.listed += FIRST_GROUPS; list(); });
  id("shade").addEventListener("change", (event) => id("detail").classList.toggle("plain", !event.target.checked));

  // ---------------------------------------------------------------- keyboard

  function step(by) {
    const cards = [...id("detail").querySelectorAll(".card")];
    const card = document.activeElement && document.activeElement.closest(".card");
    const at = card ? cards.indexOf(card) + by : by > 0 ? 0 : -1;
    if (at >= 0 && at < cards.length) focusCard(at);
    else if (card || by < 0) go(state.at + by, by > 0 ? 0 : -1);
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const at = event.target;
    if (/^(INPUT|SELECT|TEXTAREA)$/.test(at.tagName)) {
      if (event.key === "Escape") at.blur();
      return;
    }
    const keys = { j: () => step(1), k: () => step(-1), n: () => go(state.at + 1, 0), p: () => go(state.at - 1, 0), "/": () => form.elements.q.focus() };
    if (keys[event.key]) {
      event.preventDefault();
      keys[event.key]();
    } else if (/^Arrow(Up|Down)$/.test(event.key) && at.closest("#groups")) {
      const next = at.parentNode[event.key === "ArrowDown" ? "nextElementSibling" : "previousElementSibling"];
      if (next) { event.preventDefault(); next.firstChild.focus(); }
    } else if (/^Arrow(Left|Right)$/.test(event.key) && at.classList.contains("body")) {
      event.preventDefault();
      moveToken(at, event.key === "ArrowRight" ? 1 : -1);
    } else if (event.key === "Escape") hideTip();
  });

  // ---------------------------------------------------------------- log-probabilities

  const tip = id("tip");

  function hideTip() {
    tip.hidden = true;
    for (const token of document.querySelectorAll(".here")) token.classList.remove("here");
  }

  function showTip(token) {
    const logprob = token.dataset.logprob;
    tip.textContent = logprob === "" ? "not sampled: written by the scheduler or the prompt"
      : `log-probability ${Number(logprob).toFixed(3)} · ${(100 * Math.exp(Number(logprob))).toPrecision(3)} %`;
    tip.hidden = false;
    const box = token.getBoundingClientRect();
    const below = box.bottom + 6 + tip.offsetHeight < window.innerHeight;
    tip.style.left = `${Math.max(4, Math.min(box.left, window.innerWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${below ? box.bottom + 6 : box.top - tip.offsetHeight - 6}px`;
  }

  function moveToken(body, by) {
    const tokens = [...body.querySelectorAll(".tok")];
    const at = tokens.findIndex((token) => token.classList.contains("here"));
    const next = tokens[at < 0 ? (by > 0 ? 0 : tokens.length - 1) : at + by];
    if (!next) return;
    hideTip();
    next.classList.add("here");
    next.scrollIntoView({ block: "nearest" });
    showTip(next);
  }

  id("detail").addEventListener("mouseover", (event) => {
    const token = event.target.closest(".tok");
    if (token) showTip(token);
    else if (!document.querySelector(".here")) tip.hidden = true;
  });
  id("detail").addEventListener("mouseleave", () => { tip.hidden = true; });
  id("detail").addEventListener("focusout", hideTip);
  window.addEventListener("scroll", () => { if (!document.querySelector(".here")) tip.hidden = true; }, { passive: true });

  refresh();
})();
