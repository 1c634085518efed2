/* What the shell does in the browser: which view the address names, controls kept in the address, light and dark. */
(() => {
  const SCHEME_KEY = "moe-studio-scheme";
  const SHARED = ["trace", "run", "theme"]; // kept when another page is opened
  const none = () => window.dash_clientside.no_update;
  let written = null; // the address that controls wrote last: their page shows it already
  let last = { time: 0, names: "" };
  let views = 0;

  const textOf = (query) => {
    const text = query.toString().replaceAll("%2C", ",");
    return text ? `?${text}` : "";
  };

  const go = (method, search) => {
    written = window.location.pathname + search;
    window.history[method](null, "", window.location.pathname + search);
    window.dispatchEvent(new CustomEvent("_dashprivate_pushstate"));
  };

  /* Write control values to the address. A slider that is pushed on, and controls that follow another one, stay one
     step of the back button. Only what somebody changed is a reason to write: components that say again, when they
     are shown, what they were given are none. `props` has the property behind each name. */
  const keep = (names, values, props = null, isStep = true) => {
    const query = new URLSearchParams(window.location.search);
    const changed = [];
    names.forEach((name, place) => {
      const value = values[place];
      const before = query.get(name);
      const text = value === null || value === undefined || String(value) === "" ? null : String(value);
      if (text === before) return;
      changed.push(name);
      if (text === null) query.delete(name); else query.set(name, text);
    });
    const search = textOf(query);
    const triggered = props && window.dash_clientside.callback_context.triggered.map((one) => one.prop_id);
    const isMeant = !props || changed.some((name) => triggered.includes(props[names.indexOf(name)]));
    if (!isMeant || search === window.location.search) return none();
    const now = Date.now();
    const passed = now - last.time;
    const same = last.names === String(changed);
    go(!isStep || passed < 400 || (same && passed < 1500) ? "replaceState" : "pushState", search);
    last = { time: now, names: String(changed) };
    return none();
  };

  /* Plotly forgets a figure's own height when the window changes its size and takes that of the element around it, which
     without this is none: the figure would be gone. */
  const holdHeight = (figure) => {
    const hold = () => {
      const height = figure._fullLayout?.height;
      if (height) figure.closest(".graph").style.height = `${height}px`;
    };
    hold();
    if (figure.on && figure.heldBy !== figure._ev) figure.on("plotly_afterplot", hold);
    figure.heldBy = figure._ev;
  };
  window.addEventListener("resize", () => document.querySelectorAll(".graph .js-plotly-plot").forEach(holdHeight), true);

  const system = () => (window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const valid = (scheme) => (scheme === "light" || scheme === "dark" ? scheme : null);

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    studio: {
      keep,

      /* The view to render, unless controls of the shown page wrote the address themselves. */
      view(pathname, search) {
        const own = pathname + (search || "") === written;
        written = pathname + (search || "");
        if (own && views) return none();
        views += 1;
        return { path: pathname, search: search || "", count: views };
      },

      scheme(search) {
        const named = valid(new URLSearchParams(search || "").get("theme"));
        const scheme = named || valid(window.localStorage.getItem(SCHEME_KEY)) || system();
        document.documentElement.setAttribute("data-ag-theme-mode", scheme); // of the tables
        return scheme;
      },

      turn(clicks, current) {
        if (!clicks) return none();
        const scheme = current === "dark" ? "light" : "dark";
        window.localStorage.setItem(SCHEME_KEY, scheme);
        return keep(["theme"], [scheme], null, false);
      },

      /* Links of the navigation: they carry what all pages share. Returns all addresses, then which are active. */
      navigation(pathname, search, pages) {
        const query = new URLSearchParams(search || "");
        const shared = new URLSearchParams();
        for (const name of SHARED) if (query.has(name)) shared.set(name, query.get(name));
        const page = pages.find((one) => one.path === pathname);
        for (const one of pages) {
          const link = document.getElementById(one.link);
          if (one === page) link?.setAttribute("aria-current", "page"); else link?.removeAttribute("aria-current");
        }
        document.title = page ? `${page.title} · MoE Offload Studio` : "MoE Offload Studio";
        return [...pages.map((one) => one.path + textOf(shared)), ...pages.map((one) => one.path === pathname)];
      },

      /* The zoomed range of a timeline in ms, or an empty list for all of it: from the figure or from the buttons. Another run or
         window begins unzoomed. */
      zoom(relayout, into, out, earlier, later, all, run, passes, current, length) {
        const from = window.dash_clientside.callback_context.triggered_id;
        const isZoomed = Boolean(current && current.length);
        const asRange = (low, high) => {
          const [start, stop] = [Math.max(0, low), Math.min(length, high)].map((value) => Number(value.toFixed(5)));
          const whole = start <= 0 && stop >= Number(length.toFixed(5));
          const next = whole || !(stop > start) ? [] : [start, stop];
          return String(next) === String(current || []) ? none() : next;
        };
        if (from === "timeline-run" || from === "timeline-passes") return isZoomed ? [] : none();
        if (!length) return none();
        if (from === "timeline-figure") {
          const keys = Object.keys(relayout || {});
          if (keys.some((key) => /^xaxis\d*\.autorange$/.test(key))) return isZoomed ? [] : none();
          const key = keys.find((one) => /^xaxis\d*\.range\[0\]$/.test(one));
          return key ? asRange(relayout[key], relayout[key.replace("[0]", "[1]")]) : none();
        }
        const [low, high] = isZoomed ? current : [0, length];
        const width = high - low;
        const action = String(from).replace("timeline-zoom-", "");
        const moved = {
          in: [low + width / 4, high - width / 4],
          out: [low - width / 2, high + width / 2],
          earlier: [Math.max(0, low - width / 2), Math.max(width, high - width / 2)],
          later: [Math.min(length - width, low + width / 2), Math.min(length, high + width / 2)],
          all: [0, length],
        }[action];
        return moved ? asRange(...moved) : none();
      },

      /* The menu on narrow screens; opening a page closes it. Hidden links must not take the focus. */
      menu(opened, pathname, navbar) {
        const isOpen = opened && window.dash_clientside.callback_context.triggered_id === "shell-menu";
        return [{ ...navbar, collapsed: { mobile: !isOpen } }, isOpen, isOpen ? "navbar" : "navbar navbar-closed"];
      },
    },
  });
})();
