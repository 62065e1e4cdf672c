// Draws every part of DiceBear's Avataaars by itself, as the file of layers that `python -m vitrine.evidence.recipes avataaars` reads:
//   npm install --prefix PACKAGES --ignore-scripts @dicebear/core@9.4.3 @dicebear/avataaars@9.4.3 @resvg/resvg-js@2.6.2
//   node draw_layers.mjs PACKAGES layers.safetensors
// The file has premultiplied RGBA of each layer, (N, 128, 128, 4), and in its header, in the order of painting,
// each layer's part, value and colours.
import { writeFileSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const SIDE = 128;
const PARTS = ["clothing", "mouth", "nose", "eyes", "eyebrows", "top", "facialHair", "accessories"];
// The style's own colours under our words: all of skin and hair, eight of clothes, six of its palettes as backgrounds.
const PALETTES = {
  skin: { black: "614335", brown: "d08b5b", sienna: "ae5d29", light: "edb98a", pale: "ffdbb4", tanned: "fd9841",
    yellow: "f8d25c" },
  hair: { auburn: "a55728", raven: "2c1b18", blond: "b58143", golden: "d6b370", chestnut: "724133", umber: "4a312c",
    rosy: "f59797", platinum: "ecdcbf", ginger: "c93305", silver: "e8e1e1" },
  clothes: { coal: "262e33", azure: "5199e4", navy: "25557c", slate: "929598", mint: "a7ffc4", magenta: "ff488e",
    scarlet: "ff5c5c", white: "ffffff" },
  background: { sky: "65c9ff", ice: "b1e2ff", lemon: "ffffb1", rose: "ffafb9", ash: "e6e6e6", peach: "ffdeb5" },
};
// What a palette colours; accessories keep the style's first colour.
const COLOURS = { skin: ["skin"], hair: ["hair", "facialHair"], clothes: ["clothes", "hat"] };
const FIXED = { accessories: "#262e33", background: "none" };

const [packages, out] = process.argv.slice(2);
if (!out) throw new Error("usage: node draw_layers.mjs PACKAGES layers.safetensors");
const modules = resolve(packages, "node_modules");
const style = `${modules}/@dicebear/avataaars`;
const components = await import(pathToFileURL(`${style}/lib/components/index.js`));
const { Resvg } = createRequire(`${modules}/from.js`)("@resvg/resvg-js");
const version = (folder) => JSON.parse(readFileSync(`${folder}/package.json`, "utf8")).version;

const coloured = (words) => {
  const colours = { ...FIXED };
  for (const [kind, names] of Object.entries(COLOURS))
    for (const name of names) colours[name] = words[kind] ? `#${PALETTES[kind][words[kind]]}` : "#010203";
  return colours;
};
const base = (parts, colours) => components.base.default(parts, colours);
const marked = base(Object.fromEntries(PARTS.map((part) => [part, { value: () => `@${part}@` }])), coloured({}));
const place = (part) => marked.match(new RegExp(`<g transform="([^"]*)">@${part}@</g>`))[1];
const order = ["skin", ...PARTS.toSorted((a, b) => marked.indexOf(`@${a}@`) - marked.indexOf(`@${b}@`))];

function drawings(part) {
  if (part === "skin") return { skin: (colours) => base({}, colours) };
  const drawn = {};
  for (const [name, draw] of Object.entries(components[part])) {
    const inside = (more) => (colours) => `<g transform="${place(part)}">${draw(more, colours)}</g>`;
    const graphic = part === "clothing" && draw({ clothingGraphic: { value: () => "@" } }, coloured({})).includes("@");
    if (!graphic) drawn[name] = inside({});
    else
      for (const [printed, value] of Object.entries(components.clothingGraphic))
        drawn[`${name}:${printed}`] = inside({ clothingGraphic: { value } });
  }
  return drawn;
}
const uses = (draw, kind) => draw(coloured({})) !== draw(coloured({ [kind]: Object.keys(PALETTES[kind])[0] }));
const choices = (kinds) => kinds.reduce(
  (sets, kind) => sets.flatMap((set) => Object.keys(PALETTES[kind]).map((word) => ({ ...set, [kind]: word }))), [{}]);

const layers = [], pixels = [];
for (const part of order)
  for (const [value, draw] of Object.entries(drawings(part)))
    for (const words of choices(Object.keys(COLOURS).filter((kind) => uses(draw, kind)))) {
      const body = `<g transform="translate(8)">${draw(coloured(words))}</g>`;
      const svg = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 280 280" fill="none">${body}</svg>`;
      pixels.push(new Resvg(svg, { fitTo: { mode: "width", value: SIDE } }).render().pixels);
      layers.push({ part, value, colours: words });
    }
const drawnBy = { avataaars: version(style), resvg: version(`${modules}/@resvg/resvg-js`) };
const table = { kind: "avataaars layers", version: 1, order, palettes: PALETTES, layers, drawn_by: drawnBy };
const data = Buffer.concat(pixels);
const header = { __metadata__: { vitrine: JSON.stringify(table) },
  layers: { dtype: "U8", shape: [layers.length, SIDE, SIDE, 4], data_offsets: [0, data.length] } };
const text = Buffer.from(JSON.stringify(header));
const padded = Buffer.concat([text, Buffer.alloc((8 - (text.length % 8)) % 8, " ")]);
const length = Buffer.alloc(8);
length.writeBigUInt64LE(BigInt(padded.length));
writeFileSync(out, Buffer.concat([length, padded, data]));
console.log(`${out}: ${layers.length} layers`);
