//! Members of a cluster that use the same memory, one after the other.

use fabric_test_support::conformance::tenants;
use memory_fabric::fabric::PathKind;
use std::net::Ipv4Addr;

#[test]
fn tenants_find_nothing_of_each_other_in_memory_that_they_reuse_over_tcp() {
    tenants::in_turn(Ipv4Addr::LOCALHOST.into(), PathKind::Tcp);
}

#[test]
fn tenants_find_nothing_of_each_other_in_memory_that_they_reuse_over_udp() {
    tenants::in_turn(Ipv4Addr::LOCALHOST.into(), PathKind::Udp);
}
