// Pages that are opened as files may not start a worker, and the search runs in one. Here a hidden frame takes its place.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow, script = inside.document.createElement("script");
      inside.postMessage = data => this.tell(this, data);  // what the worker says
      this.ready = new Promise(loaded => { script.onload = loaded; });
      script.src = new URL(url, location.href);
      inside.document.body.append(script);
    }
    postMessage(data) { this.ready.then(() => this.tell(this.frame.contentWindow, data)); }
    tell(listener, data) {
      const event = new MessageEvent("message", {data});
      listener.dispatchEvent(event);
      if (listener.onmessage && listener === this) listener.onmessage(event);
    }
    terminate() { this.frame.remove(); }
  };
  window.Worker = window.IFrameWorker;
}
