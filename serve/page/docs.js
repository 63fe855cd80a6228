"use strict";

let components = {};

/** Follows a reference of the description. */
function resolve(schema) {
  const name = schema && schema.$ref && schema.$ref.split("/").pop();
  return name ? components[name] || {} : schema || {};
}

/** Writes a schema as a type: "string", "[integer]", "string or null". */
function type(schema) {
  schema = resolve(schema);
  const choices = schema.anyOf || schema.oneOf;
  if (choices) return choices.map(type).join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.type === "array") return `[${type(schema.items)}]`;
  if (schema.format === "binary") return "bytes";
  if (schema.properties) {
    return `{${Object.keys(schema.properties).join(", ")}}`;
  }
  return schema.type || "any";
}

function table(title, rows) {
  if (!rows.length) return [];
  return [
    make("h4", {}, title),
    make("table", {}, make("tbody", {}, ...rows.map(([first, ...rest]) =>
      make("tr", {}, make("th", { scope: "row" }, make("code", {}, first)),
        ...rest.map((text) => make("td", {}, text)))))),
  ];
}

/** The fields of an object, its own and those of the objects within it. */
function fields(schema, prefix = "") {
  schema = resolve(schema);
  return Object.entries(schema.properties || {}).flatMap(([name, field]) => {
    let within = resolve(field);
    let path = `${prefix}${name}`;
    if (within.type === "array") {
      within = resolve(within.items);
      path += "[]";
    }
    const required = (schema.required || []).includes(name);
    const own = [`${prefix}${name}`, type(field), [
      required ? "required" : "default" in field ? `default ${JSON.stringify(field.default)}` : "",
      field.description || "",
    ].filter(Boolean).join("; ")];
    return [own, ...fields(within, `${path}.`)];
  });
}

/** A line for a shell that asks this route. */
function curl(method, path, operation) {
  const lines = [`curl -s '${location.origin}${path.replaceAll("{model}", components.model)}'`];
  const content = operation.requestBody ? operation.requestBody.content : {};
  if (operation.security) lines.push("-H 'Authorization: Bearer KEY'");
  const json = content["application/json"];
  if (json) {
    lines.push("-H 'Content-Type: application/json'", `-d '${JSON.stringify(json.example)}'`);
  } else if (method !== "get") {
    lines.push(`-X ${method.toUpperCase()}`);
  }
  return lines.join(" \\\n  ");
}

function show(method, path, operation) {
  const content = operation.requestBody ? operation.requestBody.content : {};
  const kinds = Object.keys(content);
  const json = content["application/json"];
  const parameters = (operation.parameters || []).map((each) =>
    [each.name, `${each.in}, ${type(each.schema)}`, each.description || ""]);
  const success = operation.responses["200"] || {};
  const answer = ((success.content || {})["application/json"] || {}).schema;
  return make("article", {}, make("details", {},
    make("summary", {}, make("span", { className: "method" }, method.toUpperCase()),
      make("code", {}, path), make("span", {}, operation.summary || "")),
    ...(operation.description || "").split("\n\n").filter(Boolean).map((text) =>
      make("p", {}, text.replaceAll("\n", " "))),
    make("pre", { tabIndex: 0 }, make("code", {}, curl(method, path, operation))),
    ...table("Parameters", parameters),
    ...(kinds.length ? [make("h4", {}, "Body"), make("p", {}, kinds.join(", "))] : []),
    ...(json ? table("Fields of the JSON", fields(json.schema)) : []),
    ...(answer ? table("Answer", answer.properties || answer.$ref ? fields(answer)
      : [["", type(answer)]]) : []),
    ...table("Statuses", Object.entries(operation.responses).map(([status, { description }]) =>
      [status, description || ""])),
  ));
}

(async () => {
  const status = document.getElementById("status");
  try {
    const response = await key.fetch("/openapi.json");
    if (!response.ok) throw new Error(await sentence(response));
    const description = await response.json();
    components = { ...description.components.schemas, model: description.info["x-model"] };
    document.getElementById("about").textContent = description.info.description;
    const groups = new Map();
    for (const [path, operations] of Object.entries(description.paths)) {
      for (const [method, operation] of Object.entries(operations)) {
        const tag = (operation.tags || ["other"])[0];
        if (!groups.has(tag)) groups.set(tag, []);
        groups.get(tag).push(show(method, path, operation));
      }
    }
    const routes = document.getElementById("routes");
    for (const [tag, shown] of groups) {
      routes.append(make("section", {}, make("h2", {}, tag), ...shown));
    }
  } catch (error) {
    status.replaceChildren(
      make("span", { className: "wrong" }, error instanceof TypeError ? UNREACHABLE : error.message),
    );
  }
})();
