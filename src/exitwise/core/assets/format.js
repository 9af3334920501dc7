// Numbers as text.

const grouped = (value) => value.toLocaleString("en");
const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
const scaleOf = (unit, largest) => unit !== "MACs" ? [1, unit] : largest >= 2e9 ? [1e9, "billion MACs"] : largest >= 2e5 ? [1e6, "million MACs"] : [1, "MACs"];
const short = (value) => String(Number(value.toPrecision(4)));
function amount(value, unit) {
  const [size, name] = scaleOf(unit, value >= 1e9 ? 2e9 : value >= 1e5 ? 1e6 : value);
  return `${short(value / size)} ${name}`;
}
