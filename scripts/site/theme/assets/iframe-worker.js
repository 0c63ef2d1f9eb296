// Browsers let no page of file:// start a worker, and the search is one: there, it runs in a frame.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.inner = frame.contentWindow
      this.early = []
      this.inner.postMessage = (data) => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      }
      const script = this.inner.document.createElement("script")
      script.src = url
      script.onload = () => {
        const waiting = this.early
        this.early = null
        waiting.forEach((data) => this.postMessage(data))
      }
      this.inner.document.body.appendChild(script)
    }

    postMessage(data) {
      if (this.early) this.early.push(data)
      else this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data }))
    }

    terminate() {
      this.inner.frameElement.remove()
    }
  }
  window.Worker = window.IFrameWorker
}
