//! Compares the published schemas with the types: no field is in one and not in the other.

use std::path::Path;

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema};
use serde_json::{Value, json};

use crate::body::{
    BalloonBody, BalloonTarget, DrainBody, DrainTarget, ErrorBody, EvictBody, EvictTarget,
    HotplugBody, HotplugTarget, MoveBody, MoveTarget, RebalanceBody, RebalanceTarget, ReloadBody,
    StateBody,
};
use crate::exit::ExitCode;
use crate::report::{self, RUNNING, Report};
use crate::status::placement::PlacementStatus;
use crate::status::transport::TransportStatus;
use crate::status::{self, Everything, NodeCounters};

/// If set, the files are written instead of compared.
const WRITE_VARIABLE: &str = "SSI_HV_WRITE_SCHEMAS";

const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs");

fn schema_of<T: JsonSchema>(inline: bool) -> Value {
    let mut settings = SchemaSettings::draft2020_12().for_serialize();
    settings.inline_subschemas = inline;
    let schema: Schema = settings.into_generator().into_root_schema_for::<T>();
    schema.into()
}

/// Constraints that the types do not express: the schema number, and the possible outcomes.
fn with_values(mut schema: Value, number: u32) -> Value {
    let properties = &mut schema["properties"];
    properties["schema"]["const"] = number.into();
    if properties.get("outcome").is_some() {
        let names = ExitCode::ALL.into_iter().map(ExitCode::name);
        properties["outcome"]["enum"] = names.chain([RUNNING]).collect();
    }
    schema
}

fn compare(file: &str, found: &Value) {
    let path = Path::new(DOCS).join(file);
    let text = format!("{}\n", serde_json::to_string_pretty(found).expect("JSON"));
    if std::env::var_os(WRITE_VARIABLE).is_some() {
        std::fs::write(&path, &text).expect("is written");
    }
    let published = std::fs::read_to_string(&path).unwrap_or_default();
    let published: Value = serde_json::from_str(&published).unwrap_or_default();
    assert_eq!(
        &published, found,
        "docs/{file} is not what the types say; {WRITE_VARIABLE}=1 cargo test -p ssi-hv-api --lib \
         schemas writes it anew"
    );
}

#[test]
fn the_published_schemas_are_those_of_the_types() {
    let report = with_values(schema_of::<Report>(false), report::SCHEMA);
    compare("report.schema.json", &report);
    let node = with_values(schema_of::<NodeCounters>(false), report::SCHEMA);
    compare("node-report.schema.json", &node);
    let everything = with_values(schema_of::<Everything>(false), status::SCHEMA);
    for part in ["VmStatus", "NodeStatus", "HeatStatus"] {
        assert!(everything["$defs"][part].is_object(), "{part}");
    }
    compare("status.schema.json", &everything);
    compare(
        "placement.schema.json",
        &schema_of::<PlacementStatus>(false),
    );
    compare(
        "transport.schema.json",
        &schema_of::<TransportStatus>(false),
    );
}

#[test]
fn the_small_bodies_of_the_interface_are_those_of_the_types() {
    let api: Value =
        serde_json::from_str(include_str!("../../../docs/openapi.json")).expect("is JSON");
    let mut expected = json!({
        "Error": schema_of::<ErrorBody>(true),
        "State": schema_of::<StateBody>(true),
        "Balloon": schema_of::<BalloonBody>(true),
        "BalloonTarget": schema_of::<BalloonTarget>(true),
        "Drain": schema_of::<DrainBody>(true),
        "DrainTarget": schema_of::<DrainTarget>(true),
        "Evict": schema_of::<EvictBody>(true),
        "EvictTarget": schema_of::<EvictTarget>(true),
        "Rebalance": schema_of::<RebalanceBody>(true),
        "RebalanceTarget": schema_of::<RebalanceTarget>(true),
        "Reload": schema_of::<ReloadBody>(true),
        "Hotplug": schema_of::<HotplugBody>(true),
        "HotplugTarget": schema_of::<HotplugTarget>(true),
        "Move": schema_of::<MoveBody>(true),
        "MoveTarget": schema_of::<MoveTarget>(true),
    });
    for schema in expected.as_object_mut().expect("an object").values_mut() {
        let schema = schema.as_object_mut().expect("an object");
        schema.remove("$schema");
        schema.remove("title");
    }
    let found = &api["components"]["schemas"];
    assert_eq!(
        found,
        &expected,
        "components.schemas of docs/openapi.json should be {}",
        serde_json::to_string_pretty(&expected).expect("JSON")
    );
}
