// Search from a folder: browsers start no workers for pages opened as files (file://). Here a hidden frame stands in for a
// worker: it runs the worker's script, and messages go between the two windows.
class IFrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.onmessage = null;
    this.onerror = null;
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.append(this.frame);
    const inside = this.frame.contentWindow;
    const loaded = new Promise((resolve) => inside.addEventListener("load", resolve, { once: true }));
    inside.document.open();
    // the frame's own window belongs to the parser: what a worker has and a window lacks is defined before its script
    inside.document.write('<!doctype html><html><body><script src="' + encodeURI(url) + '"><\/script></body></html>');
    inside.postMessage = (data) => this.receive(data);
    inside.importScripts = (...urls) => IFrameWorker.load(inside, urls);
    inside.document.close();
    this.ready = Promise.race([loaded, new Promise((resolve) => this.frame.addEventListener("load", resolve, { once: true }))]);
  }
  // Scripts are loaded one after the other. A worker's importScripts waits for them; this one returns a promise.
  static async load(inside, urls) {
    for (const url of urls) {
      await new Promise((resolve, reject) => {
        const script = inside.document.createElement("script");
        Object.assign(script, { src: url, onload: resolve, onerror: reject });
        inside.document.body.append(script);
      });
    }
  }
  receive(data) {
    const event = new MessageEvent("message", { data });
    this.dispatchEvent(event);
    if (this.onmessage) this.onmessage(event);
  }
  postMessage(data) {
    const inside = this.frame.contentWindow;
    this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data: structuredClone(data) })));
  }
  terminate() {
    this.frame.remove();
  }
}
window.IFrameWorker = IFrameWorker;
if (location.protocol === "file:") window.Worker = IFrameWorker;
