// What our widgets say, in the page's language. The English text is the key, and what other languages get.
import { app } from "../../scripts/app.js";

const LANGUAGES = ["zh", "ja", "ko"];
const WORDS = {
  "points on the picture": [
    "在图上取点",
    "画像上の点",
    "그림 위의 점",
  ],
  "Connect a picture, or run once": [
    "请连接图片，或先运行一次",
    "画像をつなぐか、一度実行してください",
    "그림을 연결하거나 한 번 실행하세요",
  ],
  "The text is not points": [
    "文本不是点",
    "テキストが点になっていません",
    "텍스트가 점이 아닙니다",
  ],
  "alike": [
    "相似度",
    "類似度",
    "유사도",
  ],
  "{input} is connected and counts; these points do not": [
    "{input} 已连接并生效；这些点不起作用",
    "{input} が接続されており、そちらが使われます。ここの点は使われません",
    "{input}가 연결되어 있어 그것이 쓰이고, 이 점들은 쓰이지 않습니다",
  ],
  "The name must be a plain one, without folders": [
    "名称必须是不含文件夹的普通名称",
    "名前はフォルダーを含まないものにしてください",
    "이름은 폴더가 없는 단순한 이름이어야 합니다",
  ],
  "No report yet: run once to make it": [
    "还没有报告：请运行一次",
    "まだレポートがありません。一度実行してください",
    "아직 보고서가 없습니다: 한 번 실행하세요",
  ],
  "The browser did not open a tab: allow it for this page": [
    "浏览器没有打开标签页：请为此页面允许",
    "ブラウザーがタブを開きませんでした。このページに許可してください",
    "브라우저가 탭을 열지 않았습니다: 이 페이지에 허용하세요",
  ],
  "what it is": [
    "它是什么",
    "これは何か",
    "무엇인지",
  ],
  "where it acts": [
    "作用在哪里",
    "どこに効くか",
    "어디에 작용하는지",
  ],
  "what it copies": [
    "复制了什么",
    "何を複製するか",
    "무엇을 복제하는지",
  ],
  "what it costs": [
    "代价是什么",
    "何を損なうか",
    "무엇을 잃는지",
  ],
  "its neighbours": [
    "相近的文件",
    "似たファイル",
    "비슷한 파일",
  ],
  "fine": [
    "正常",
    "問題なし",
    "정상",
  ],
  "look": [
    "请查看",
    "要確認",
    "확인 필요",
  ],
  "bad": [
    "有问题",
    "問題あり",
    "문제 있음",
  ],
  "not measured": [
    "未测量",
    "未測定",
    "측정 안 함",
  ],
  "save this person as LoRA": [
    "将此人物保存为 LoRA",
    "この人物を LoRA として保存",
    "이 인물을 LoRA로 저장",
  ],
  "copy these sliders": [
    "复制这些滑块",
    "これらのスライダーをコピー",
    "이 슬라이더 복사",
  ],
  "Copied: {text}": [
    "已复制：{text}",
    "コピーしました：{text}",
    "복사했습니다: {text}",
  ],
  "All sliders are at 0": [
    "所有滑块都为 0",
    "スライダーはすべて 0 です",
    "모든 슬라이더가 0입니다",
  ],
  "LoRA report": [
    "LoRA 报告",
    "LoRA レポート",
    "LoRA 보고서",
  ],
  "neurons by layer": [
    "各层神经元",
    "層ごとのニューロン",
    "층별 뉴런",
  ],
  "Run once to see the neurons": [
    "运行一次即可看到神经元",
    "一度実行するとニューロンが見えます",
    "한 번 실행하면 뉴런이 보입니다",
  ],
  "{on} neurons blocked, {off} left alone; click one to see what it does": [
    "已阻断 {on} 个神经元，保留 {off} 个；点击可查看其内容",
    "{on} 個のニューロンを遮断、{off} 個はそのまま。クリックすると中身が見えます",
    "뉴런 {on}개 차단, {off}개 유지; 클릭하면 무엇을 담고 있는지 보입니다",
  ],
  "leave alone": [
    "保留",
    "残す",
    "그대로 두기",
  ],
  "block": [
    "阻断",
    "遮断する",
    "차단",
  ],
  "{deviations} deviations above or below ordinary captions: {activation}, usually {usual}": [
    "与普通描述相差 {deviations} 个标准差：{activation}，通常为 {usual}",
    "普通のキャプションから標準偏差 {deviations} 個分のずれ：{activation}、ふだんは {usual}",
    "보통 캡션에서 표준편차 {deviations}만큼 벗어남: {activation}, 평소 {usual}",
  ],
  "strongest at {tokens}": [
    "在 {tokens} 处最强",
    "{tokens} で最も強い",
    "{tokens}에서 가장 강함",
  ],
  "strongest at tokens {tokens} of the prompt (from 0)": [
    "在提示词的第 {tokens} 个 token 处最强（从 0 数起）",
    "プロンプトのトークン {tokens} で最も強い（0 から数える）",
    "프롬프트의 토큰 {tokens}에서 가장 강함 (0부터 셈)",
  ],
  "left alone, likeness to the copied prediction rises to {alone}; below {limit} was wanted": [
    "若保留它，与复制预测的相似度会升到 {alone}；目标是低于 {limit}",
    "残すと、コピーされた予測との類似度が {alone} まで上がります。目標は {limit} 未満",
    "그대로 두면 복제된 예측과의 유사도가 {alone}까지 오릅니다; 목표는 {limit} 미만",
  ],
  "Nothing is recorded of it: an imported list, or a file of an older version": [
    "没有它的记录：导入的列表，或旧版本的文件",
    "記録がありません：取り込んだリスト、または古い版のファイルです",
    "기록이 없습니다: 가져온 목록이거나 이전 버전의 파일입니다",
  ],
  "{name} of {width}: blocked": [
    "{name}（共 {width}）：已阻断",
    "{name}（全 {width}）：遮断",
    "{name} (전체 {width}): 차단됨",
  ],
  "{name} of {width}: left alone": [
    "{name}（共 {width}）：保留",
    "{name}（全 {width}）：そのまま",
    "{name} (전체 {width}): 유지됨",
  ],
  "people and sliders": [
    "人物与滑块",
    "人物とスライダー",
    "인물과 슬라이더",
  ],
  "Run once to see the space": [
    "运行一次即可看到空间",
    "一度実行すると空間が見えます",
    "한 번 실행하면 공간이 보입니다",
  ],
  "The picture's prompt; of the panel only": [
    "图片的提示词；仅用于面板",
    "画像のプロンプト。このパネルだけのもの",
    "그림의 프롬프트; 이 패널에만 적용",
  ],
  "The picture's seed; of the panel only": [
    "图片的种子；仅用于面板",
    "画像のシード。このパネルだけのもの",
    "그림의 시드; 이 패널에만 적용",
  ],
  "Values change; for a picture connect {inputs}": [
    "数值会改变；要显示图片，请连接 {inputs}",
    "値は変わります。画像を表示するには {inputs} をつないでください",
    "값은 바뀝니다; 그림을 보려면 {inputs}를 연결하세요",
  ],
  "The graph runs; the picture follows afterwards": [
    "工作流正在运行；图片随后更新",
    "グラフの実行中です。画像は終わってから更新されます",
    "그래프가 실행 중입니다; 그림은 끝난 뒤 갱신됩니다",
  ],
  "Drawing ...": [
    "正在绘制……",
    "描画中……",
    "그리는 중……",
  ],
  "The server does not answer": [
    "服务器没有响应",
    "サーバーが応答しません",
    "서버가 응답하지 않습니다",
  ],
  "coloured by {label}; drag the person, double-click to take them back": [
    "按 {label} 着色；拖动人物，双击可还原",
    "{label} で色分け。人物をドラッグ、ダブルクリックで元に戻す",
    "{label}(으)로 색칠; 인물을 드래그하고, 더블클릭하면 되돌립니다",
  ],
  "drag the person, double-click to take them back": [
    "拖动人物，双击可还原",
    "人物をドラッグ、ダブルクリックで元に戻す",
    "인물을 드래그하고, 더블클릭하면 되돌립니다",
  ],
  "No sliders in this space yet: {node} makes one": [
    "此空间还没有滑块：{node} 可以制作",
    "この空間にはまだスライダーがありません：{node} で作れます",
    "이 공간에는 아직 슬라이더가 없습니다: {node}(으)로 만듭니다",
  ],
  "colour the map by {label}; the person has {value}, training models reach {reach}": [
    "按 {label} 为地图着色；此人为 {value}，训练模型可达 {reach}",
    "地図を {label} で色分け。この人物は {value}、学習モデルは {reach} まで",
    "지도를 {label}(으)로 색칠; 이 인물은 {value}, 학습 모델은 {reach}까지",
  ],
  "choose a layer": [
    "选择层",
    "層を選ぶ",
    "레이어 고르기",
  ],
  "edit the curve": [
    "绘制曲线",
    "曲線を描く",
    "곡선 그리기",
  ],
  "noise": [
    "噪声",
    "ノイズ",
    "노이즈",
  ],
  "picture": [
    "成图",
    "完成画像",
    "완성 그림",
  ],
  "Click to make your own weight curve": [
    "点击绘制自己的权重",
    "クリックして独自の重みを描く",
    "클릭해서 직접 가중치를 그리세요",
  ],
  "The text is not a curve": [
    "文本不是曲线",
    "テキストが曲線になっていません",
    "텍스트가 곡선이 아닙니다",
  ],
  "type ...": [
    "输入…",
    "入力する…",
    "직접 입력…",
  ],
  "open the report": [
    "打开报告",
    "レポートを開く",
    "보고서 열기",
  ],
  "click: add, shift-click: not wanted, drag: move, right click or Delete: remove": [
    "单击添加，Shift+单击为不想要的，拖动移动，右键或 Delete 删除",
    "クリックで追加、Shift+クリックは不要な点、ドラッグで移動、右クリックか Delete で削除",
    "클릭: 추가, Shift+클릭: 원하지 않음, 드래그: 이동, 오른쪽 클릭이나 Delete: 삭제",
  ],
  "click: add, drag: move, right click or Delete: remove": [
    "单击添加，拖动移动，右键或 Delete 删除",
    "クリックで追加、ドラッグで移動、右クリックか Delete で削除",
    "클릭: 추가, 드래그: 이동, 오른쪽 클릭이나 Delete: 삭제",
  ],
  "weight of the size, over the run": [
    "尺寸的权重（随采样过程）",
    "サンプリング中のサイズの重み",
    "샘플링 동안 크기의 가중치",
  ],
  "reset": [
    "重置",
    "リセット",
    "초기화",
  ],
  "All sliders to 0, and the person back to where they were": [
    "所有滑块归零，人物回到原位",
    "すべてのスライダーを 0 に、人物を元の位置に戻します",
    "모든 슬라이더를 0으로, 인물을 제자리로 되돌립니다",
  ],
  "double-click: 0; arrow keys: one step": [
    "双击归零；方向键移动一步",
    "ダブルクリックで 0、矢印キーで 1 段階",
    "더블클릭: 0, 화살표 키: 한 단계",
  ],
  "{count} sliders trained from pictures before and after": [
    "{count} 个由前后图片训练的滑块",
    "前後の画像から学習した {count} 個のスライダー",
    "전후 그림으로 학습한 슬라이더 {count}개",
  ],
  "show advanced inputs": [
    "显示高级输入",
    "詳細な入力を表示",
    "고급 입력 표시",
  ],
  "hide advanced inputs": [
    "隐藏高级输入",
    "詳細な入力を隠す",
    "고급 입력 숨기기",
  ],
};

/** A text in the page's language, with {name} replaced by ``values.name``. */
export function t(text, values = {}) {
  const language = String(app.extensionManager?.setting?.get?.("Comfy.Locale") ?? "en").split("-")[0];
  const said = WORDS[text]?.[LANGUAGES.indexOf(language)] ?? text;
  return said.replace(/\{(\w+)\}/g, (all, name) => values[name] ?? all);
}
