//! Compares the interface document with the tables.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::vm_routes;
use crate::control_socket::protocol::{PREFIX, RefusalCode};
use crate::control_socket::route::Route;
use crate::node;

/// Properties of an operation: its status codes, its servers, and whether it has a body and
/// parameters.
type Operation = (BTreeSet<u16>, BTreeSet<&'static str>, bool, bool);

fn add<S>(
    operations: &mut BTreeMap<(String, String), Operation>,
    who: &'static str,
    routes: &[Route<S>],
) {
    for route in routes {
        assert!(route.path.starts_with(PREFIX), "{}", route.path);
        let method = route.method.name().to_lowercase();
        let (codes, by, body, parameters) = operations
            .entry((route.path.to_owned(), method))
            .or_default();
        let refused = RefusalCode::ALL.into_iter();
        codes.extend(
            refused
                .filter(|c| route.may_refuse(*c))
                .map(RefusalCode::status),
        );
        codes.insert(route.status);
        assert!(by.insert(who), "{} is there twice", route.path);
        *body |= route.takes_body;
        *parameters |= route.until.is_some();
    }
}

#[test]
fn the_document_and_the_tables_have_the_same_operations() {
    let mut in_code = BTreeMap::new();
    add(&mut in_code, "vm", vm_routes::ROUTES);
    add(&mut in_code, "node", node::ROUTES);

    let api: Value =
        serde_json::from_str(include_str!("../../../docs/openapi.json")).expect("is JSON");
    let mut documented = BTreeMap::new();
    for (path, operations) in api["paths"].as_object().expect("paths") {
        for (method, operation) in operations.as_object().expect("operations") {
            let responses = operation["responses"].as_object().expect("responses");
            let codes = responses.keys().map(|code| code.parse().expect("a code"));
            let by = operation["x-answered-by"].as_array().expect("who");
            let by = by.iter().map(|who| match who.as_str() {
                Some("vm") => "vm",
                Some("node") => "node",
                other => panic!("{path}: {other:?}"),
            });
            let found: Operation = (
                codes.collect(),
                by.collect(),
                operation.get("requestBody").is_some(),
                operation.get("parameters").is_some(),
            );
            documented.insert((path.clone(), method.clone()), found);
        }
    }
    assert_eq!(documented, in_code);
}

#[test]
fn the_document_names_every_refusal_and_points_nowhere_empty() {
    let text = include_str!("../../../docs/openapi.json");
    let api: Value = serde_json::from_str(text).expect("is JSON");
    let manual = include_str!("../../../docs/control.md");
    for code in RefusalCode::ALL {
        let name = serde_json::to_value(code).expect("is JSON");
        let name = format!("`{}`", name.as_str().expect("a string"));
        assert!(text.contains(&name), "{name} is not in docs/openapi.json");
        assert!(manual.contains(&name), "{name} is not in docs/control.md");
    }
    for (path, operations) in api["paths"].as_object().expect("paths") {
        for method in operations.as_object().expect("operations").keys() {
            let line = format!("`{} {path}`", method.to_uppercase());
            assert!(manual.contains(&line), "{line} is not in docs/control.md");
        }
    }
    let mut references = Vec::new();
    collect_references(&api, &mut references);
    assert!(references.len() > 20);
    for reference in references {
        let (file, pointer) = reference.split_once('#').unwrap_or((&reference, ""));
        let target: Value = match file {
            "" => api.clone(),
            file => {
                let path = format!("{}/../docs/{file}", env!("CARGO_MANIFEST_DIR"));
                let text = std::fs::read_to_string(&path).expect(&path);
                serde_json::from_str(&text).expect("is JSON")
            }
        };
        assert!(target.pointer(pointer).is_some(), "{reference}");
    }
}

fn collect_references(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            if let Some(Value::String(reference)) = fields.get("$ref") {
                found.push(reference.clone());
            }
            fields
                .values()
                .for_each(|value| collect_references(value, found));
        }
        Value::Array(values) => values
            .iter()
            .for_each(|value| collect_references(value, found)),
        _ => {}
    }
}
