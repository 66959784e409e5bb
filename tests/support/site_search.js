// The site's own search without a browser. Arguments: its worker, its index. Queries are lines of the standard input;
// prints, as JSON, the number of pages that each finds.
const fs = require("fs");

const [worker, index] = process.argv.slice(2);
let listen, answer;
globalThis.self = globalThis;
globalThis.addEventListener = (type, listener) => (listen = listener);
globalThis.postMessage = (message) => (answer = message.data);
(0, eval)(fs.readFileSync(worker, "utf8"));

(async () => {
  const [SETUP, QUERY] = [0, 2];
  const content = JSON.parse(fs.readFileSync(index, "utf8"));
  await listen({ data: { type: SETUP, data: { ...content, options: {} } } });
  const pages = {};
  for (const query of fs.readFileSync(0, "utf8").split("\n")) {
    await listen({ data: { type: QUERY, data: query } });
    pages[query] = answer.items.length;
  }
  console.log(JSON.stringify(pages));
})();
