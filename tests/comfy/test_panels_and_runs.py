"""Panels of the page beside runs of the graph: whose state they are told, who has the models, what /free frees."""

import gc
import json
import threading
import weakref
from types import SimpleNamespace

import pytest
from vitrine_tests.hangs import HANGS

INPUTS = {"label_1": "beard", "strength_1": 2.0}
SPACE = "portraits people (shipped)"
STUDENT = "vitrine/vitrine-portraits-emd-student.safetensors"


def people_graph(seed, edit="6", own=False):
    """*Person Sliders (W2W)* of a person, with a model of its own or the panel's."""
    person = {"seed": seed, "spread": 1.0, "components": 0, "truncation": 0.0, "wanted": "", "attributes": "auto"}
    sliders = {f"label_{i}": "" for i in range(1, 5)} | {f"strength_{i}": 0.0 for i in range(1, 5)}
    model = {"model": ["1", 0], "positive": ["2", 0], "vae": ["1", 2], "student": STUDENT} if own else {}
    nodes = {
        "1": ("VitrineLoadPortraits", {"model": "portraits, 64 px"}),
        "2": ("CLIPTextEncode", {"text": "a face", "clip": ["1", 1]}),
        "4": ("VitrineLoadW2WSpace", {"space_file": SPACE, "components": 0}),
        "5": ("VitrineW2WSample", {"space": ["4", 0], **person}),
        edit: ("VitrineW2WEdit", {"space": ["4", 0], "w2w_model": ["5", 0], "protect": "", **sliders, **model}),
        "10": ("PreviewAny", {"source": [edit, 1]}),
    }
    return {number: {"class_type": kind, "inputs": inputs} for number, (kind, inputs) in nodes.items()}


@pytest.fixture
def queue(comfy):
    """ComfyUI's own, watched."""
    import execution
    from vitrine.nodes.comfy.run_watch import RunWatch

    queue, runs = execution.PromptQueue(SimpleNamespace(queue_updated=lambda: None)), RunWatch()
    runs.watch(queue)
    return SimpleNamespace(queue=queue, runs=runs)


def put(queue, **about):
    queue.put((0, "run", {}, about, [], {}))


class Worker(threading.Thread):
    """Core's loop: takes what comes, ends it when told."""

    def __init__(self, queue):
        super().__init__(daemon=True)
        self.queue, self.got, self.end, self.outputs = queue, threading.Event(), threading.Event(), {}
        self.start()

    def run(self):
        while (found := self.queue.get(timeout=HANGS)) is not None:
            self.got.set()
            assert self.end.wait(HANGS)
            self.queue.task_done(found[1], {"outputs": self.outputs}, status=None)
            self.queue.get_flags()


def free(mutex):
    """Whether another thread could take it now."""
    taken = mutex.acquire(blocking=False)
    if taken:
        mutex.release()
    return taken


def test_a_run_waits_for_a_picture_and_the_server_for_neither(queue):
    """C1: while a picture is rendered the queue's mutex is free, and the run begins only afterwards."""
    worker = Worker(queue.queue)
    with queue.runs.between_runs():
        assert free(queue.queue.mutex) and not queue.runs.wanted
        put(queue.queue)
        while not queue.queue.currently_running:  # the worker has the run, and is held back
            worker.join(0.01)
        assert free(queue.queue.mutex) and queue.runs.wanted and not worker.got.is_set()
    assert worker.got.wait(HANGS)


def test_a_picture_waits_for_a_run(queue):
    from vitrine.nodes.comfy.run_watch import Busy

    worker = Worker(queue.queue)
    put(queue.queue)
    assert worker.got.wait(HANGS)
    with pytest.raises(Busy), queue.runs.between_runs():
        pass
    worker.end.set()
    while queue.runs.wanted:
        worker.join(0.01)
    with queue.runs.between_runs():
        assert free(queue.queue.mutex)


def test_the_newest_request_wins_and_closed_tabs_cancel(queue):
    """C1: requests wait their turn, one of each panel; nobody renders for a page that has gone."""
    from vitrine.nodes.comfy.render_thread import Gone, RenderThread, Superseded

    thread, began, go, done = RenderThread(queue.runs), threading.Event(), threading.Event(), []

    def first(check):
        began.set()
        assert go.wait(HANGS)

    asked = [thread.ask("a", first)]
    assert began.wait(HANGS)
    asked += [thread.ask(panel, lambda check, n=n: done.append(n)) for n, panel in enumerate("abab")]
    closed = thread.ask("c", lambda check: done.append("closed"), lambda: True)
    go.set()
    for answer in (asked[3], asked[4]):
        answer.result(HANGS)
    assert done == [2, 3]
    for answer, error in ((asked[1], Superseded), (asked[2], Superseded), (closed, Gone)):
        assert isinstance(answer.exception(HANGS), error)


def test_a_run_cuts_a_picture_short(queue):
    """Between two stages: the run does not wait for the rest of the picture."""
    from vitrine.nodes.comfy.render_thread import RenderThread
    from vitrine.nodes.comfy.run_watch import Busy

    def work(check):
        check()
        put(queue.queue)
        check()

    assert isinstance(RenderThread(queue.runs).ask("a", work).exception(HANGS), Busy)


# --- whose state --------------------------------------------------------------------------------------------------
def place(comfy, client, workflow, node):
    """Where the panel of a node shows its person."""
    from vitrine.nodes.comfy import people
    from vitrine.nodes.comfy.panel_state import NodeKey

    session = people.SESSIONS.find(NodeKey(client, workflow, node))
    return session and people.laid_out(session)["person"]


def about(client, workflow):
    return {"client_id": client, "extra_pnginfo": {"workflow": {"id": workflow}}}


def test_equal_ids_of_two_workflows_two_tabs_and_a_subgraph(comfy):
    """C2: a node is known by client, workflow and its id in the run."""
    runs = {("tab", "one", "6"): 4, ("tab", "two", "6"): 5, ("other", "one", "6"): 6, ("tab", "one", "7:6"): 8}
    for (client, workflow, node), seed in runs.items():
        _, error = comfy.run(people_graph(seed, edit=node), about=about(client, workflow))
        assert error is None, error
    shown = {key: place(comfy, *key) for key in runs}
    assert all(shown.values()) and len({tuple(where) for where in shown.values()}) == 4
    for unknown in (("other", "two", "6"), ("tab", "one", "7"), ("", "", "9:6")):
        assert place(comfy, *unknown) is None


def test_every_panel_of_a_large_graph_is_known(comfy):
    """ComfyUI caches all nodes of a graph, so that a forgotten one would never run again."""
    graph = people_graph(4)
    for n in range(20, 50):
        inputs = graph["6"]["inputs"] | {"label_1": "beard", "strength_1": n / 10}
        text = {"class_type": "PreviewAny", "inputs": {"source": [str(n), 1]}}
        graph |= {str(n): graph["6"] | {"inputs": inputs}, str(n + 30): text}
    _, error = comfy.run(graph, about=about("tab", "large"))
    assert error is None, error
    assert all(place(comfy, "tab", "large", str(n)) for n in (6, *range(20, 50)))


def test_what_came_from_the_cache_is_known_in_the_tab_that_asked(comfy, queue):
    """One executor, as the server has: the second run executes nothing, and its tab is told what the first made."""
    from vitrine.nodes.comfy import panel_state

    executor, graph = comfy.executor(), people_graph(4)
    outputs = {}
    for client in ("first tab", "second tab"):
        result, error = comfy.run(graph, executor, about=about(client, "cached"))
        assert error is None, error
        outputs[client] = result["outputs"]
    assert place(comfy, "first tab", "cached", "6") and place(comfy, "second tab", "cached", "6") is None
    mark = outputs["second tab"]["6"][panel_state.MARK]
    assert mark == outputs["first tab"]["6"][panel_state.MARK]
    queue.runs.finished.append(panel_state._finished)
    worker = Worker(queue.queue)
    worker.outputs = outputs["second tab"]
    worker.end.set()
    put(queue.queue, **about("second tab", "cached"))
    while place(comfy, "second tab", "cached", "6") is None:
        worker.join(0.01)
    assert place(comfy, "second tab", "cached", "6") == place(comfy, "first tab", "cached", "6")


# --- memory -------------------------------------------------------------------------------------------------------
def patchers():
    import comfy.model_patcher

    return {id(o) for o in gc.get_objects() if isinstance(o, comfy.model_patcher.ModelPatcher)}


def test_freed_memory_is_free(comfy):
    """C3: a panel keeps no MODEL, VAE or CLIP alive once ComfyUI has dropped the outputs of its nodes."""
    gc.collect()
    before, executor = patchers(), comfy.executor()
    _, error = comfy.run(people_graph(4, own=True), executor)
    assert error is None, error
    ours = patchers() - before
    assert ours, "MODEL, CLIP and VAE have one each"
    executor.reset()
    gc.collect()
    assert not patchers() & ours


def test_a_picture_of_nan_is_refused(comfy):
    """A prompt's weights may be anything; a black picture would say that the person is."""
    from vitrine.engine.errors import VitrineError
    from vitrine.nodes.comfy import people
    from vitrine.nodes.comfy.panel_state import NodeKey

    comfy.run(people_graph(4), about=about("tab", "nan"))
    session = people.SESSIONS.find(NodeKey("tab", "nan", "6"))
    assert people.portrait(session, INPUTS, "(a face:1.3)", 7)["picture"]
    for prompt in ("(a face:1e999)", "(a face:nan)", "(" * 900 + "a" + ")" * 900):
        with pytest.raises(VitrineError, match="NaN or infinite"):
            people.portrait(session, INPUTS, prompt, 7)


def test_a_panel_says_that_its_model_is_gone(comfy):
    from vitrine.engine.errors import VitrineError
    from vitrine.nodes.comfy import people
    from vitrine.nodes.comfy.panel_state import NodeKey

    executor = comfy.executor()
    comfy.run(people_graph(4, own=True), executor)
    session = people.SESSIONS.find(NodeKey("", "", "6"))
    assert people.portrait(session, INPUTS, "", 7)["picture"]
    prompt = weakref.ref(session.renderer().positive("")[0][0])
    executor.reset()
    gc.collect()
    assert prompt() is None, "its conditioning goes with the model"
    with pytest.raises(VitrineError, match="run the graph once"):
        people.portrait(session, INPUTS, "", 7)
    assert people.laid_out(session)["labels"], "the map is still there"
    text = people.layout_text(session)
    assert json.loads(text) == people.laid_out(session) and people.layout_text(session) is text, "made once"


def test_the_panels_own_networks_are_freed_and_come_back(comfy, queue):
    """C3: /free sets the queue's flags, which core's worker reads."""
    from vitrine.nodes.comfy import people
    from vitrine.nodes.comfy.panel_state import NodeKey
    from vitrine.nodes.comfy.run_watch import RUNS

    queue.runs.freed = RUNS.freed
    _, error = comfy.run(people_graph(4), about=about("tab", "freed"))
    assert error is None, error
    session = people.SESSIONS.find(NodeKey("tab", "freed", "6"))
    picture = people.portrait(session, INPUTS, "", 7)["picture"]
    network = weakref.ref(people.shipped().model.model)
    queue.queue.set_flag("unload_models", True)
    queue.queue.get_flags()
    gc.collect()
    assert network() is None and place(comfy, "tab", "freed", "6")
    assert people.portrait(session, INPUTS, "", 7)["picture"] == picture
    queue.queue.set_flag("free_memory", True)
    queue.queue.get_flags()
    assert place(comfy, "tab", "freed", "6") is None, "the node's outputs are gone, so it will run again"
