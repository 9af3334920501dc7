// The search runs in a worker, and browsers start none for a page opened as a file. There, a hidden frame does its work.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const script = new URL(url, location.href).href.replace(/&/g, "&amp;").replace(/"/g, "%22");
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.said = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      this.frame.srcdoc = `<script>postMessage = (data) => frameElement.said(data)</script><script src="${script}"></script>`;
      this.ready = new Promise((resolve) => { this.frame.onload = resolve; });
      document.body.append(this.frame);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
