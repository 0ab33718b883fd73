"""The style of the report's page."""

from __future__ import annotations

from tiering.replay.charts import COLORS

STYLE = (
    """
:root{--ink:#1c2330;--soft:#5b6474;--line:#dfe3ea;--paper:#fff;--tint:#f4f6f9;
--c0:#7a5195;--c1:#1f6feb;--c2:#e8710a;--c3:#0f9d76;--c4:#d6336c;--c5:#8a6d00;--c6:#0b7285;--c7:#6b7280}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--soft:#a0a8b6;--line:#323a48;--paper:#14181f;--tint:#1c222c;
--c0:#b794d6;--c1:#6ea8fe;--c2:#ffa34d;--c3:#4fd1a5;--c4:#f783ac;--c5:#e0c050;--c6:#66d9e8;--c7:#adb5bd}}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1320px;margin:0 auto;padding:24px 20px 60px}
p,ul{max-width:860px}h1{font-size:1.35rem;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:2.2em 0 .6em}
figure{margin:0 0 1.4em;max-width:860px}figcaption{font-weight:600}svg{width:100%;height:auto;display:block}
svg text{font-size:12px;fill:var(--soft)}.grid{stroke:var(--line)}.axis,.tick{stroke:var(--soft)}
@media(max-width:600px){svg text{font-size:19px}}
.line{fill:none;stroke-width:2.2}.line.ink{stroke:var(--ink)}.mark.ink{fill:var(--ink)}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;color:var(--soft);font-size:13px}
.legend i{display:inline-block;width:18px;height:0;border-top:4px solid;margin-right:6px;vertical-align:middle}
.legend i.ink{border-color:var(--ink)}
"""
    + "".join(
        f".line.c{n}{{stroke:var(--c{n})}}.mark.c{n}{{fill:var(--c{n})}}.legend i.c{n}{{border-color:var(--c{n})}}\n"
        for n in range(COLORS)
    )
    + """
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px;white-space:nowrap;width:100%}
th,td{padding:5px 9px;text-align:right;border-bottom:1px solid var(--line)}th{color:var(--soft);font-weight:600}
th:first-child,td:first-child{text-align:left}
tr.best td{background:var(--tint);font-weight:600}tr.base td{color:var(--soft)}
pre{background:var(--tint);border-radius:8px;padding:12px 14px;
white-space:pre-wrap;overflow-wrap:anywhere;font-size:13px}
"""
)
