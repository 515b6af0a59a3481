//! Tests of the fields of a status.

use super::heat::ExtentStatus;
use super::*;
use crate::fixtures::{block, node_status, status, status_of_nodes};

#[test]
fn a_node_of_an_older_release_is_understood() {
    let mut value = serde_json::to_value(node_status()).expect("is JSON");
    value.as_object_mut().expect("an object").remove("rdma");
    let node: NodeStatus = serde_json::from_value(value).expect("is a status");
    assert_eq!(node.counters.rdma, rdma::NodeRdma::default());
}

#[test]
fn a_vm_of_an_older_release_says_nothing_about_cpus_of_the_host() {
    let mut value = serde_json::to_value(status()).expect("is JSON");
    let guest = value["guest"].as_object_mut().expect("an object");
    guest.remove("cpu_pinning").expect("a field");
    guest.remove("dedicated_cpus").expect("a field");
    let status: VmStatus = serde_json::from_value(value).expect("is a status");
    assert_eq!(status.guest.cpu_pinning, None);
    assert!(!status.guest.dedicated_cpus);
}

#[test]
fn what_is_shown_travels_as_json() {
    for before in [status(), status_of_nodes()] {
        let text = serde_json::to_string(&before).expect("is JSON");
        let after: VmStatus = serde_json::from_str(&text).expect("is a status");
        assert_eq!(after, before);
    }
}

/// The names of all fields in a value, at any depth.
fn field_names(value: &serde_json::Value, names: &mut Vec<String>) {
    match value {
        serde_json::Value::Object(fields) => {
            for (name, value) in fields {
                names.push(name.clone());
                field_names(value, names);
            }
        }
        serde_json::Value::Array(values) => {
            values.iter().for_each(|value| field_names(value, names));
        }
        _ => {}
    }
}

#[test]
fn the_document_has_every_field() {
    let heat = heat::HeatStatus {
        block_pages: 64,
        pages: 64,
        pages_looked_at: 64,
        extents: vec![ExtentStatus {
            first_page: 0,
            pages: 64,
            home: 1,
            blocks: vec![block(1, 2, 3, 4)],
        }],
    };
    let all = Everything {
        schema: SCHEMA,
        vms: vec![
            VmStatus {
                heat: Some(heat),
                ..status()
            },
            status_of_nodes(),
        ],
        nodes: vec![node_status()],
    };
    let value = serde_json::to_value(all).expect("is JSON");
    let mut names = Vec::new();
    field_names(&value, &mut names);
    assert!(names.iter().any(|name| name == "recent_faults"));
    assert!(names.iter().any(|name| name == "protection_domains"));
    assert!(names.iter().any(|name| name == "early_losses"));
    let document = include_str!("../../../../docs/report.md");
    for name in names {
        assert!(document.contains(&name), "{name} is not in docs/report.md");
    }
}
