"use strict";

/** Makes an element: make("p", {className: "time"}, "3 ms"). */
function make(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

/** What a refusal says, in the shape of either dialect, or what stands for it. */
async function sentence(response) {
  let error;
  try {
    error = (await response.json()).error;
  } catch {
    // it was no JSON
  }
  const text = (error && error.message) || error || `the server answered ${response.status}`;
  return String(text).charAt(0).toUpperCase() + String(text).slice(1) + ".";
}

const UNREACHABLE = "The server cannot be reached; is it running?";

/** The key, which lives as long as the tab; people who wait for it are told when it comes. */
const key = {
  waiting: null,

  /** Asks for the key; all who need one wait for the same answer. */
  ask() {
    const form = document.getElementById("ask");
    this.waiting ??= new Promise((resolve) => {
      form.hidden = false;
      document.getElementById("key").focus();
      form.onsubmit = (event) => {
        event.preventDefault();
        sessionStorage.setItem("key", document.getElementById("key").value);
        form.hidden = true;
        this.waiting = null;
        resolve();
      };
    });
    return this.waiting;
  },

  /** Fetches with the key, and asks for it as often as the server refuses it. */
  async fetch(path, options = {}) {
    for (;;) {
      const used = sessionStorage.getItem("key");
      const headers = { ...options.headers };
      if (used) headers.Authorization = `Bearer ${used}`;
      const response = await fetch(path, { ...options, headers });
      if (response.status !== 401) return response;
      if (used === sessionStorage.getItem("key")) await this.ask();
    }
  },
};
