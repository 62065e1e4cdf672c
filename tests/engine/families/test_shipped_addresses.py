"""The table of the shipped models' addresses is what their networks say. VITRINE_WRITE_DOCS=1 writes it."""

import json
import os
import subprocess
import sys

from vitrine.cli.commands import TABLES, shipped_addresses
from vitrine.engine.pipelines.loading import FLOW, SHIPPED, load_backbone
from vitrine.engine.tracing.addresses import sites_of, usual


def test_the_table_is_what_the_networks_say():
    tables = {}
    for model in (SHIPPED, FLOW):
        sites = sites_of(load_backbone(model))
        tables[model] = {"default": usual(sites), "rows": [[s.address, s.kind, s.path] for s in sites.values()]}
    if os.environ.get("VITRINE_WRITE_DOCS"):
        rows = {m: ",\n".join(f"  {json.dumps(row)}" for row in t["rows"]) for m, t in tables.items()}
        parts = (f'"{m}": {{"default": "{t["default"]}", "rows": [\n{rows[m]}]}}' for m, t in tables.items())
        TABLES.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")
    assert json.loads(TABLES.read_text(encoding="utf-8")) == tables
    assert shipped_addresses("somebody/else") is None


def test_a_list_of_addresses_and_help_pages_import_nothing_heavy():
    code = (
        "import sys\nfrom vitrine.cli.main import main\n"
        "for words in (['--help'], ['addresses'], ['addresses', 'flow portraits', 'auto'], ['w2w', 'invert', '--help'],"
        " ['addresses', 'portraits', 'nothing*']):\n"
        "    try: main(words)\n    except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'diffusers', 'transformers', 'peft', 'sklearn', 'scipy', 'PIL', 'matplotlib'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert done.stderr.startswith("vitrine: address: given nothing*") and "up-level" in done.stdout
