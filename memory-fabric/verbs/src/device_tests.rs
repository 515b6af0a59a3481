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
        &Settings::default(),
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
        let choice = DeviceChoice::Named(name.to_owned()).into();
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
        &DeviceChoice::None.into(),
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
        &Settings::default(),
        "127.0.0.1".parse().expect("an address"),
    ) {
        Ok((device, route)) => assert_eq!(device.name(), route.device),
        Err(RdmaError::NoLibrary | RdmaError::NoDevice | RdmaError::NoRoute { .. }) => {}
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_device_that_does_not_answer_hides_no_other() {
    let silent = || Err(RdmaError::NoDevice);
    let there = || Ok(vec![roce("mlx5_0", "10.77.0.1")]);
    let ports = of_those_that_answer([silent(), there(), silent()].into_iter());
    assert_eq!(ports.expect("a port").len(), 1);
    of_those_that_answer([silent()].into_iter()).expect_err("no port");
    assert!(
        of_those_that_answer([].into_iter())
            .expect("none")
            .is_empty()
    );
}

fn set(ports: &[PortSummary], settings: &Settings) -> Result<Route, String> {
    let local = "10.77.0.1".parse().expect("an address");
    Route::choose(ports, settings, local).map_err(|error| error.to_string())
}

#[test]
fn a_port_and_an_index_that_were_set_are_taken() {
    let mut second = roce("mlx5_0", "10.77.0.1");
    second.port = 2;
    let ports = [
        roce("rxe0", "10.0.0.1"),
        roce("mlx5_0", "10.77.0.1"),
        second,
    ];
    let settings = |port, gid_index| Settings {
        port,
        gid_index,
        ..Settings::default()
    };
    let route = set(&ports, &settings(Some(2), None)).expect("there");
    assert_eq!(
        (route.device.as_str(), route.port, route.gid_index),
        ("mlx5_0", 2, 2)
    );
    // The port is still that of the address, and the entry the one that was set.
    let route = set(&ports, &settings(None, Some(0))).expect("there");
    assert_eq!(
        (route.device.as_str(), route.port, route.gid_index),
        ("mlx5_0", 1, 0)
    );
    assert_eq!(route.gid.to_ip().to_string(), "fe80::1");
    let text = set(&ports, &settings(Some(3), None)).expect_err("no port 3");
    assert!(
        text.contains("port=3") && text.contains("mlx5_0 port 2 active"),
        "{text}"
    );
    let text = set(&ports, &settings(None, Some(9))).expect_err("no index 9");
    assert!(text.contains("gid-index=9"), "{text}");
    assert!(text.contains("2 (10.77.0.1, RoCE v2)"), "{text}");
}

#[test]
fn an_index_may_have_an_address_that_the_peer_does_not_know() {
    let ports = [roce("rxe0", "10.0.0.1")];
    let settings = Settings {
        gid_index: Some(2),
        ..Settings::default()
    };
    assert_eq!(set(&ports, &settings).expect("there").gid_index, 2);
    let elsewhere = Settings {
        device: DeviceChoice::Named("mlx5_0".to_owned()),
        ..settings
    };
    let text = set(&ports, &elsewhere).expect_err("another device");
    assert!(text.contains("mlx5_0"), "{text}");
}

#[test]
fn packets_become_smaller_and_never_larger_than_the_port_allows() {
    let mut port = roce("rxe0", "10.77.0.1");
    port.mtu = Mtu::from_bytes(1024).expect("a size of packets");
    let settings = |bytes| Settings {
        mtu: Mtu::from_bytes(bytes),
        service_level: 3,
        traffic_class: 106,
        ..Settings::default()
    };
    let route = set(std::slice::from_ref(&port), &settings(512)).expect("smaller");
    assert_eq!(route.mtu.bytes(), 512);
    assert_eq!((route.service_level, route.traffic_class), (3, 106));
    let text = set(std::slice::from_ref(&port), &settings(2048)).expect_err("larger");
    assert!(
        text.contains("mtu=2048") && text.contains("1024 is the limit"),
        "{text}"
    );
}
