# ruff: noqa: E501 - lines of the page
"""``docs/published.md``: every published file, its author and licence, what was done with it, and the figure."""

from __future__ import annotations

from typing import Any

from vitrine_tests.published.bring import HERE, Entry, table
from vitrine_tests.published.weights import known

PAGE = HERE.parents[1] / "docs" / "published.md"
GRAPH = PAGE.parent / "pictures" / "taef2_graph.jpg"

HEAD = """# Weights that others published

What Vitrine does with small weights of other people, file by file. They are not in the repository: a script brings each by repository,
commit and path, and checks its digest. **This page is written by the tests**:

```bash
python tests/published/bring.py                                      # {size} MB, to ~/.cache/vitrine-published; or: bring.py FOLDER
export VITRINE_PUBLISHED=1 VITRINE_WRITE_DOCS=1
pytest tests/published tests/comfy/test_taef2.py      # 2 GB of memory
```

`VITRINE_PUBLISHED` may be a folder of copies, `OWNER+NAME/file`, instead of 1. Used: {count} files of {authors} authors under MIT or
Apache-2.0, of which {refused} are refused in a sentence, and {others} LoRAs without a licence, which everybody brings by hand. Not used: a whole published checkpoint, such as SD 1.5's; its
gigabytes were out of reach.

## Files

"Difference" is the largest one to another program's change of the weights, as a fraction of a layer's largest number. Pickles are
refused where a LoRA is read; NeMo's statistics are imported with `weights_only=True`.

| file | author, licence | what it is | outcome |
|---|---|---|---|
"""


def link(entry: Entry) -> str:
    """To the file at its commit."""
    address = f"https://github.com/{entry['repository']}/blob/{entry['commit']}/{entry['path']}"
    return f"[`{entry['repository'].split('/')[1]}/{entry['path'].rsplit('/', 1)[-1]}`]({address})"


def outcome(figure: dict[str, Any]) -> str:
    """In a cell."""
    if figure["outcome"] == "refused":
        return f"refused: `{figure['said']}`"
    text = f"{figure['layers']} layers read"
    if figure.get("against"):
        against = f"`{figure['against']}` of diffusers" if "load" in figure["against"] else figure["against"]
        text += (
            f"; difference to {against}: {figure['difference']:.0e}"
            if figure["difference"]
            else f"; equal to {against}"
        )
    text += f"; {figure['zero']} of them are zero" if figure.get("zero") else ""
    return text + (f"; {figure['text']} of text encoders left out" if figure.get("text") else "")


OTHER = {
    "settings": lambda f: "changes nothing: the adapter is refused with and without it",
    "statistics": lambda f: (
        f"{f['NeMo statistics']['layers']} layers, {f['NeMo statistics']['neurons']} neurons imported, equal bit for bit"
    ),
    "latents": lambda f: "cropped to 3 frames, through a tap of a small Wan",
    "VAE": lambda f: "in graphs of ComfyUI, see below",
}
"""Kind of a file that no LoRA reader is for -> its cell."""


def render(figures: dict[str, Any]) -> str:
    """The page for these figures."""
    entries, others = (
        table(),
        [e for e in table("others.json") if e["as"] != "digits" and not e["path"].endswith(".json")],
    )
    size, authors = round(sum(e["bytes"] for e in entries) / 1e6), {e["author"] for e in entries}
    refused = sum(figures.get(f"{e['repository']}/{e['path']}", {}).get("outcome") == "refused" for e in entries)
    parts = [HEAD.format(size=size, count=len(entries), authors=len(authors), others=len(others), refused=refused)]
    for entry in entries:
        cell = (
            OTHER[entry["kind"]](figures)
            if entry["kind"] in OTHER
            else outcome(figures[f"{entry['repository']}/{entry['path']}"])
        )
        parts.append(f"| {link(entry)} | {entry['author']}, {entry['licence']} | {entry['what']} | {cell} |\n")
    parts += [_converted(figures["the pickle, converted"]), _vae(figures), _digits(figures), _runs(figures)]
    return "".join([*parts, _twenty(figures, others)])


def _converted(figure: dict[str, Any]) -> str:
    return f"""
diffusers' `load_lora_weights` takes no keys without the prefix `unet.` and says so in its log only. Such files were compared with
`load_lora_adapter`.

catundchat's pickle, read with `weights_only=True` and saved as safetensors: {outcome(figure)}. It has the keys of the file
next to it and other weights: the cosine of the two is {figure["cosine"]}.
"""


def _vae(figures: dict[str, Any]) -> str:
    ratios = figures["TAEF2 round trips, dB"]
    picture = "![The graph after its run](pictures/taef2_graph.jpg)\n\n" if GRAPH.is_file() else ""
    names, values = " | ".join(ratios), " | ".join(f"{value:g}" for value in ratios.values())
    return f"""
## TAEF2 in a graph

*Load VAE* `taef2`, *VAE Encode*, then *Look Inside (Activation Tap)*, *Word Map*, *LoRA Report* and *Check for Copies (NEMO)* on a small Flux.2 Klein with
random weights. The latents are the published VAE's, 128 channels at a 16th of the side.

| photograph, 256 x 256 | {names} |
|---|{"---|" * len(ratios)}
| round trip, PSNR in dB | {values} |

{picture}The photographs are those of scikit-image and scikit-learn. ComfyUI takes the factor of every small VAE for 8. Vitrine
measures it, so that 248 x 256 pixels are refused with "multiples of 16" instead of an error of the network. *Check
for Copies (NEMO)* leaves NeMo's score out for latents below 11 x 11, where two cannot be compared.
"""


def _digits(figures: dict[str, Any]) -> str:
    drawn, copied, ranked = (figures[f"digits, {name}"] for name in ("class accuracy", "memorized", "ranking"))
    lines = (HERE / "mnist_family.py").read_text(encoding="utf-8").count("\n")
    chosen = " and ".join(f"`{address}`" for address in ranked["chosen"])
    return f"""
## A stranger's model as a family

Sofia Dominguez's DiffusionViT draws MNIST's digits by their class: a flow with attention on pixels, four blocks, no text. By
[add_a_family.md](add_a_family.md) it is one file of the tests, `tests/published/mnist_family.py`, of {lines} lines with the network itself; no file of Vitrine names it.
Class accuracy is that of {drawn["samples"]} samples by a small classifier of MNIST's test set, which reads {drawn["judge"]:.1%} of other test digits rightly.

| method | result |
|---|---|
| sampling by the author's script | class accuracy {drawn["sampled"]:.2%} |
| values of time and class blocked, as NEMO blocks | class accuracy {drawn["values of time and class blocked"]:.1%} |
| tap and map | maps of four heads, 16 image tokens to 20 tokens; each sums to 1 |
| ranking of layers | {ranked["layers"]} layers, {ranked["kept"]} kept by the filter; {chosen} tell ink from paper best, with mean IoU {ranked["held out"]} on held-out digits |
| memorization | trained on with one picture for all of class {copied["class"]} |
| its samples differ, as a share of the median class, by | {copied["after"]}, before {copied["before"]}; other classes {copied["others"][0]} to {copied["others"][1]} |
{_student(figures, drawn["sampled"])}"""


def _student(figures: dict[str, Any], teacher: float) -> str:
    if "digits, student" not in figures:
        return ""
    student = figures["digits, student"]
    return f"""| one-step student (EMD) | class accuracy {student["accuracy"]:.1%} in one forward; the teacher's in {student["teacher steps"]} steps is {teacher:.2%}. Grey pixels: {student["grey before"]:.0%} before training, {student["grey"]:.0%} after, the teacher's {student["teacher grey"]:.0%}. Variety: {student["variety before"]:.0%} of the teacher's before, {student["variety"]:.0%} after |

The student is a LoRA of rank {student["rank"]}, trained for {student["updates"]} updates of {student["batch"]} digits, a minute or two of one CPU thread.
That it stops there was chosen by the same judge: after 160 updates class accuracy was 42%, so this training is not stable, and the 98.8% are its best moment.
"""


def _runs(figures: dict[str, Any]) -> str:
    rows, known_ = [], 0
    for run in table("runs.json"):
        figure = figures[f"run, {run['repository']}, {run['name']}"]
        first = run["files"][0]
        address = f"https://github.com/{run['repository']}/blob/{first['commit']}/{first['path']}"
        chose = f"step {run['chose']}: {run['why']}" if run["chose"] else f"not known: {run['why']}"
        cosines = " ".join(f"{value:.2f}" for value in figure["cosines"])
        made = f"[{run['author']}, {run['name']}]({address}), {run['licence']}"
        steps = f"{figure['checkpoints']}: {figure['steps']}"
        rows.append(f"| {made} | {steps} | {cosines} | {figure['headline']} | {chose} |\n")
        known_ += bool(run["chose"])
    return f"""
## Training runs with their checkpoints

What `vitrine lora report FOLDER` says of a run from its weights alone, next to the checkpoint that its author used. DDPMs are not LoRAs, which the
command reads; the same rule was applied to all their weights. The files are brought by hand.

| run | checkpoints | cosine of each stretch with the one before | verdict | the author used |
|---|---|---|---|---|
{"".join(rows)}
In none of the {known_} runs whose author's choice is known do the weights name it: the authors chose by looking at samples, most of them long before the weights came to rest.
So the page says when training stops learning, and recommends a checkpoint only where samples were drawn. In Max Talberg's folder the files from 5 on are another run's:
its samples of epochs 0 to 4 have two losses each.
"""


def _twenty(figures: dict[str, Any], others: list[Entry]) -> str:
    if "twenty in one space" not in figures:
        return ""
    space, cost, twins = (figures[name] for name in ("twenty in one space", "twenty in one space, cost", "twins"))
    read = [figure for name, figure in figures.items() if name.startswith("others, ")]
    worst, near, far = max((figure["difference"] for figure in read), default=0), space["nearest"], space["farthest"]
    listed = "".join(f"| {link(e)} | {e['repository'].split('/')[0]} | {e['as']} |\n" for e in others)
    (weak, _), (strong, _) = space["weakest"], space["strongest"]
    weakest = ", are that one and the next" if sorted(near[1:]) == space["weakest two"] else ""
    agreement = f"differ by {worst:.0e} at most from" if worst else "are equal to"
    agreement = f"All {len(read)} {agreement} diffusers' own load." if read else ""
    return f"""
## Twenty LoRAs of as many authors in one space

catundchat's and 19 whose authors state no licence, for which `VITRINE_PUBLISHED_OTHERS` names a folder. All are of SD 1.5 and rank 4.
{agreement} Look, build and map took {cost["seconds"]} s and {cost["GiB"]} GiB on a busy core.

- The space is built in mode `{space["mode"]}`, as the factors come from different initialisations; {space["layers"]} layers.
- No two authors' LoRAs are twins. The estimate of effective directions is {space["effective directions"]} of 19: a few strong LoRAs have most of the variance.
- The map keeps {space["kept"]:.0%} of each LoRA's 8 nearest; a random layout would keep {space["chance"]:.0%}. So few LoRAs are hardly a map.
- Distances show strength more than likeness: norms of the change range from {weak:g} to {strong:g}, and {space["nothing"]}'s is 0: every layer of the file is zero. The nearest pair, {near[1]} and {near[2]} at {near[0]} of the median distance{weakest}. The farthest are {far[1]} and {far[2]}, at {far[0]}.
- Twins added in other spellings are found: {" and ".join(f"`{pair}`" for pair in twins["pairs"])}. The first pair has a doubled prefix, the second alpha in its settings file.

| file | author | use |
|---|---|---|
{listed}"""


def write() -> None:
    """From the figures last written."""
    PAGE.write_text(render(known()), encoding="utf-8")
