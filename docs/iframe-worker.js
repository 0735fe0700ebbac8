// Search in pages that are opened from a folder: browsers start no worker there, so the search runs in a hidden frame.
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    this.inside = frame.contentWindow;
    this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    this.inside.importScripts = () => {};
    const script = this.inside.document.createElement("script");
    script.src = url;
    this.loaded = new Promise((resolve) => script.addEventListener("load", resolve));
    this.inside.document.body.append(script);
  }

  postMessage(data) {
    const event = new this.inside.MessageEvent("message", { data });
    this.loaded.then(() => this.inside.dispatchEvent(event));
  }

  terminate() {
    this.inside.frameElement.remove();
  }
}

if (location.protocol === "file:") window.Worker = FrameWorker;
