use super::*;

fn port(device: &str, link: LinkLayer, gids: &[(GidKind, &str)]) -> PortSummary {
    let gids = gids
        .iter()
        .zip(0..)
        .map(|(&(kind, address), index)| GidEntry {
            index,
            gid: Gid::from_ip(address.parse().expect("an address")),
            kind,
        });
    PortSummary {
        device: device.to_owned(),
        port: 1,
        active: true,
        usable: true,
        link,
        lid: 7,
        mtu: Mtu::from_bytes(4096).expect("a size of packets"),
        gids: gids.collect(),
    }
}

fn roce(device: &str, address: &str) -> PortSummary {
    let gids = [
        (GidKind::RoceV2, "fe80::1"),
        (GidKind::RoceV1, address),
        (GidKind::RoceV2, address),
    ];
    port(device, LinkLayer::Ethernet, &gids)
}

fn choose(ports: &[PortSummary], local: &str) -> Result<Route, RdmaError> {
    Route::choose(
        ports,
        &DeviceChoice::Automatic,
        local.parse().expect("an address"),
    )
}

#[test]
fn the_port_with_the_wanted_address_is_chosen_and_version_2_before_1() {
    let ports = [roce("rxe0", "10.0.0.1"), roce("rxe1", "10.77.0.1")];
    let route = choose(&ports, "10.77.0.1").expect("there");
    assert_eq!((route.device.as_str(), route.gid_index), ("rxe1", 2));
    assert_eq!(route.gid.to_ip().to_string(), "10.77.0.1");
    // The form in which a dual-stack socket reports it.
    assert_eq!(choose(&ports, "::ffff:10.77.0.1").expect("there"), route);
    let old = port(
        "old",
        LinkLayer::Ethernet,
        &[(GidKind::RoceV1, "10.77.0.1")],
    );
    assert_eq!(choose(&[old], "10.77.0.1").expect("there").gid_index, 0);
}

#[test]
fn an_address_that_no_port_has_is_an_error_that_shows_the_ports() {
    let error = choose(&[roce("rxe0", "10.0.0.1")], "127.0.0.1").expect_err("elsewhere");
    let text = error.to_string();
    assert!(
        text.contains("127.0.0.1") && text.contains("rxe0 port 1 active"),
        "{text}"
    );
    assert!(text.contains("10.0.0.1"), "{text}");
}

#[test]
fn ports_that_are_down_or_need_a_manager_are_left_out() {
    let mut down = roce("rxe0", "10.0.0.1");
    down.active = false;
    let text = choose(&[down], "10.0.0.1").expect_err("down").to_string();
    assert!(text.contains("rxe0 port 1 down"), "{text}");
    let mut iwarp = roce("siw0", "10.0.0.1");
    iwarp.usable = false;
    let text = choose(&[iwarp], "10.0.0.1").expect_err("iWARP").to_string();
    assert!(text.contains("manager"), "{text}");
}

#[test]
fn infiniband_is_taken_whatever_the_address() {
    let ib = port(
        "mlx5_0",
        LinkLayer::InfiniBand,
        &[(GidKind::InfiniBand, "fe80::2")],
    );
    let route = choose(std::slice::from_ref(&ib), "192.168.1.1").expect("there");
    assert_eq!((route.lid, route.link), (7, LinkLayer::InfiniBand));
    // Ethernet with the exact address is preferred.
    let route = choose(&[ib, roce("rxe0", "192.168.1.1")], "192.168.1.1").expect("there");
    assert_eq!(route.device, "rxe0");
}

#[test]
fn a_device_that_was_named_is_taken_or_missed_by_name() {
    let ports = [roce("rxe0", "10.0.0.1"), roce("rxe1", "10.77.0.1")];
    let named = |name: &str| {
        let choice = DeviceChoice::Named(name.to_owned());
        Route::choose(&ports, &choice, "10.0.0.1".parse().expect("an address"))
    };
    assert_eq!(named("rxe1").expect("with its first address").gid_index, 0);
    assert_eq!(named("rxe0").expect("with the wanted one").gid_index, 2);
    let text = named("mlx5_9").expect_err("absent").to_string();
    assert!(
        text.contains("mlx5_9") && text.contains("rxe0, rxe1"),
        "{text}"
    );
    let none = Route::choose(
        &ports,
        &DeviceChoice::None,
        "10.0.0.1".parse().expect("an address"),
    );
    assert!(matches!(none, Err(RdmaError::NoDevice)));
}

#[test]
fn packet_sizes_are_those_of_verbs() {
    for (number, bytes) in [(1, 256), (2, 512), (3, 1024), (4, 2048), (5, 4096)] {
        let mtu = Mtu::from_verbs(number).expect("a number of verbs");
        assert_eq!((mtu.bytes(), mtu.to_verbs()), (bytes, number));
        assert_eq!(Mtu::from_bytes(bytes), Some(mtu));
    }
    assert_eq!(Mtu::from_verbs(0).or(Mtu::from_verbs(6)), None);
    assert_eq!(Mtu::from_bytes(8192).or(Mtu::from_bytes(128)), None);
}

#[test]
fn a_host_without_devices_or_library_gives_an_error_and_does_not_end_the_process() {
    match Device::for_peer(
        &DeviceChoice::Automatic,
        "127.0.0.1".parse().expect("an address"),
    ) {
        Ok((device, route)) => assert_eq!(device.name(), route.device),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
