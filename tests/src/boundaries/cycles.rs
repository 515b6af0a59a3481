//! Import cycles between the files of a crate.

use super::{code, sources, workspace};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Source folders of the crates that must be free of cycles. Imports between a module and its
/// descendants do not count. The verbs crate is not listed: its device holds weak references to the
/// domain and queue that its connections share, and these hold the device.
const WITHOUT_CYCLES: &[&str] = &[
    "devices/src",
    "kernel-images/src",
    "memory-fabric/host/src",
    "memory-fabric/identity/src",
    "memory-fabric/pages/src",
    "memory-fabric/src",
    "memory-fabric/transport/src",
    "memory-fabric/wire/src",
    "kernel-images/initrd/src",
    "vmm/api/src",
    "vmm/control/src",
    "vmm/machine/src",
    "vmm/src",
    "vmm/html/src",
    "vmm/metrics/src",
];

/// A module as its path components; empty for the crate root.
type Module = Vec<String>;

/// Returns the module of a source file.
fn module_of(root: &Path, path: &Path) -> Module {
    let inside = path.strip_prefix(root).expect("below the root");
    let mut names: Module = inside
        .with_extension("")
        .iter()
        .map(|name| name.to_string_lossy().into_owned())
        .collect();
    if matches!(
        names.last().map(String::as_str),
        Some("mod" | "lib" | "main")
    ) {
        names.pop();
    }
    names
}

/// Returns the paths that a file names, relative to the crate root.
fn paths(module: &Module, text: &str) -> Vec<Module> {
    let text: String = text.lines().map(code).collect::<Vec<_>>().join("\n");
    let text = without_unit_tests(&text);
    let mut found = Vec::new();
    for start in ["crate::", "super::"] {
        for (at, _) in text.match_indices(start) {
            let before = text[..at].chars().next_back();
            if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':') {
                continue;
            }
            let mut base = if start == "crate::" {
                Module::new()
            } else {
                module[..module.len().saturating_sub(1)].to_vec()
            };
            let mut rest = &text[at + start.len()..];
            while let Some(after) = rest.strip_prefix("super::") {
                base.pop();
                rest = after;
            }
            found.extend(
                names(rest)
                    .into_iter()
                    .map(|path| [base.clone(), path].concat()),
            );
        }
    }
    found
}

/// Returns the part of a file before its unit tests, which may import anything. A declaration such
/// as `#[cfg(test)] mod tests;` does not end that part.
fn without_unit_tests(text: &str) -> &str {
    let starts_tests = |&(at, marker): &(usize, &str)| {
        let rest = &text[at + marker.len()..];
        let end = rest.find([';', '{']);
        end.is_some_and(|end| rest[end..].starts_with('{'))
    };
    let mut markers = text.match_indices("#[cfg(test)]");
    markers
        .find(starts_tests)
        .map_or(text, |(at, _)| &text[..at])
}

/// Expands a path expression: `a::b`, or each path of `a::{b, c::d}`.
fn names(text: &str) -> Vec<Module> {
    let mut path = Module::new();
    let mut rest = text;
    loop {
        if let Some(list) = rest.strip_prefix('{') {
            let lists = items(list).into_iter().flat_map(names);
            return lists.map(|tail| [path.clone(), tail].concat()).collect();
        }
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
        let (name, after) = rest.split_at(end.unwrap_or(rest.len()));
        path.push(name.to_owned());
        match after.strip_prefix("::") {
            Some(next) => rest = next,
            None => return vec![path],
        }
    }
}

/// Splits the contents of a brace list, whose opening brace was removed, into items.
fn items(list: &str) -> Vec<&str> {
    let (mut depth, mut start, mut found) = (0, 0, Vec::new());
    for (at, character) in list.char_indices() {
        match character {
            '{' => depth += 1,
            '}' if depth == 0 => {
                found.push(list[start..at].trim());
                break;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                found.push(list[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    found.retain(|item| !item.is_empty());
    found
}

/// Maps each module to the modules that its file imports, without its ancestors and descendants.
fn imports(files: &[(Module, String)]) -> BTreeMap<Module, BTreeSet<Module>> {
    let modules: BTreeSet<&Module> = files.iter().map(|(module, _)| module).collect();
    let edges = |module: &Module, text: &str| {
        let mut edges = BTreeSet::new();
        for mut path in paths(module, text) {
            while !path.is_empty() && !modules.contains(&path) {
                path.pop();
            }
            if !path.starts_with(module) && !module.starts_with(&path) {
                edges.insert(path);
            }
        }
        edges
    };
    let files = files.iter();
    files
        .map(|(module, text)| (module.clone(), edges(module, text)))
        .collect()
}

/// Returns the modules that import themselves transitively.
fn in_cycles(imports: &BTreeMap<Module, BTreeSet<Module>>) -> Vec<String> {
    let leads_back = |start: &Module| {
        let mut seen = BTreeSet::new();
        let mut ahead = vec![start];
        while let Some(module) = ahead.pop() {
            for next in imports.get(module).into_iter().flatten() {
                if next == start {
                    return true;
                }
                if seen.insert(next) {
                    ahead.push(next);
                }
            }
        }
        false
    };
    let modules = imports.keys().filter(|module| leads_back(module));
    modules.map(|module| module.join("::")).collect()
}

#[test]
fn files_do_not_import_each_other_in_a_circle() {
    let mut found = Vec::new();
    for folder in WITHOUT_CYCLES {
        let root = workspace().join(folder);
        let read = |path: std::path::PathBuf| {
            let text = std::fs::read_to_string(&path).expect("a source");
            (module_of(&root, &path), text)
        };
        let paths = sources(&root).into_iter();
        let paths = paths.filter(|path| !path.to_string_lossy().ends_with("tests.rs"));
        let files: Vec<_> = paths.map(read).collect();
        let cycles = in_cycles(&imports(&files));
        if !cycles.is_empty() {
            found.push(format!("{folder}: {}", cycles.join(", ")));
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn a_circle_is_found_and_parent_and_child_are_none() {
    let file = |module: &str, text: &str| {
        let names = module.split("::").filter(|name| !name.is_empty());
        (
            names.map(str::to_owned).collect::<Module>(),
            text.to_owned(),
        )
    };
    let files = [
        file("", "mod a;"),
        file("a", "use crate::{b::{X, Y}, c};\nmod d;"),
        file("a::d", "use super::Z; // crate::a::d"),
        file("b", "fn f() { super::c::g() }"),
        file(
            "c",
            "#[cfg(test)]\nmod more_tests;\nuse std::fmt;\n#[cfg(test)]\nmod tests { use crate::a; }",
        ),
    ];
    assert_eq!(in_cycles(&imports(&files)), [""; 0]);
    let mut files = files.to_vec();
    files[4] = file("c", "#[cfg(test)]\nmod tests;\nuse crate::a::Thing;");
    assert_eq!(in_cycles(&imports(&files)), ["a", "b", "c"]);
}
