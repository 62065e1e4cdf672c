"""Boxes of nodes on ComfyUI's page, and which of them overlap."""

BOXES = """app.graph._nodes.map(n => {
    const drawn = LiteGraph.vueNodesMode && document.querySelector(`[data-node-id="${n.id}"]`)?.getBoundingClientRect()
    n.updateArea()
    const [x, y, w, h] = n.boundingRect, scale = app.canvas.ds.scale
    return [`${n.title} (${n.id})`, x, y, ...(drawn ? [drawn.width / scale, drawn.height / scale] : [w, h])].map(
        v => typeof v === 'number' ? Math.round(v) : v)
})"""
"""Name, x, y, width and height of every node as it is drawn, with its title and its picture."""


def overlaps(boxes):
    """Pairs of (name, x, y, width, height) that share some place."""
    return [
        (a[0], b[0])
        for k, a in enumerate(boxes)
        for b in boxes[:k]
        if a[1] < b[1] + b[3] and b[1] < a[1] + a[3] and a[2] < b[2] + b[4] and b[2] < a[2] + a[4]
    ]
