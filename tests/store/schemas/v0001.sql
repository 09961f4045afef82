-- A database of schema 0001, as its evo left it, with a record of every kind.
BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0001');
CREATE TABLE artefact (
	sha256 VARCHAR(64) NOT NULL, 
	kind TEXT NOT NULL, 
	size BIGINT NOT NULL, 
	data BLOB NOT NULL, 
	CONSTRAINT pk_artefact PRIMARY KEY (sha256), 
	CONSTRAINT ck_artefact_kind CHECK (kind IN ('source', 'binary', 'ptx'))
);
INSERT INTO "artefact" VALUES('13ab25c23ccb09ddf7b9492f8971a2c8f141eac329e73732ccdda844a484fac5','source',700,X'789CD3D757484ECC4BC94C492C495530B05238B7A7982B3EBEB8322FB924A3283531A55843D37A54605460300A0000E386F62D');
INSERT INTO "artefact" VALUES('b17d972588cad9aeaa7e3ff710ec8007f8b42f128519dfe102223b890e3c4798','binary',204,X'789CAB77F57163182600000FB40157');
INSERT INTO "artefact" VALUES('9bde986e88aeadbca950d4c482582392dc993bf6d1b86d7da30cef18f71f6642','source',700,X'789CD3D757484ECC4BC94C492C495530B45238B7A7982B3EBEB8322FB924A3283531A55843D37A54605460300A0000E635F62E');
INSERT INTO "artefact" VALUES('ce34394dab2ea6e5a6e99995a85b78072bd2163dc283b75206ffdd32ada948b2','binary',204,X'789CAB77F571636060601C0E1800230A0189');
INSERT INTO "artefact" VALUES('e28c65eba38acfd1481950e5f9798d83d8a21bcce6100eb09fee8c50ed3556c7','source',700,X'789CD3D757484ECC4BC94C492C495530B25238B7A7982B3EBEB8322FB924A3283531A55843D37A54605460300A0000E8E4F62F');
INSERT INTO "artefact" VALUES('fd79d55021ba951fda975d3ff212cebc02c4a5a74404648631f84c6e276bd3ff','binary',204,X'789CAB77F571636060601A0E1800366001BB');
INSERT INTO "artefact" VALUES('d0e6250a0613e48499008a02e5eeef141f4b0f426f2925c35bd51bcd70a7681f','source',700,X'789CD3D757484ECC4BC94C492C495530B65238B7A7982B3EBEB8322FB924A3283531A55843D37A54605460300A0000EB93F630');
INSERT INTO "artefact" VALUES('0cef087d7eb8963b2fc0bcedbb6f7c9a63fefeb4741304339f2d0a355bda836e','binary',204,X'789CAB77F571636060601E0E180049B601ED');
INSERT INTO "artefact" VALUES('2fbcbbc64a93e289d552d1b9842f01f53047a26f168f28c47d890993345913ef','source',700,X'789CD3D757484ECC4BC94C492C495530B15238B7A7982B3EBEB8322FB924A3283531A55843D37A54605460300A0000EE42F631');
INSERT INTO "artefact" VALUES('4bc7cd8a7434223b0e2054c154a88f224c069f2c1757bb573fa7d3e981c0320a','binary',204,X'789CAB77F57163606060190E18005D0C021F');
INSERT INTO "artefact" VALUES('e5f69173541a6dbc86c82f0943b9185d0fb62a0953819fbc2f67ceb1940d93dd','source',15,X'789C2BC9C82C5600A2BCFC1205676D6D002B7304DF');
INSERT INTO "artefact" VALUES('87c56638054cb0dfc0052c55a5a787a4aa5ec6b0fffb8c888bb9d7cee3bc0535','source',700,X'789CD3D757484ECC4BC94C492C495530B75238B7A7982B3EBEB8322FB924A3283531A55843D37A54605460300A0000F64FF634');
INSERT INTO "artefact" VALUES('1e99518f9c23a111f998d43233449cb5c440cc01c44aeaab6fd41ec2214737b9','binary',204,X'789CAB77F571636060601F0E1800970E02B5');
CREATE TABLE build (
	candidate_id INTEGER NOT NULL, 
	arch TEXT NOT NULL, 
	compiler TEXT NOT NULL, 
	status TEXT NOT NULL, 
	seconds DOUBLE NOT NULL, 
	cached BOOLEAN NOT NULL, 
	log TEXT NOT NULL, 
	binary_log TEXT, 
	source_digest VARCHAR(64) NOT NULL, 
	registers INTEGER, 
	spill_bytes INTEGER, 
	smem_static_bytes INTEGER, 
	smem_dynamic_bytes INTEGER, 
	stack_bytes INTEGER, 
	occupancy DOUBLE, 
	code_hash VARCHAR(64), 
	binary_sha VARCHAR(64), 
	CONSTRAINT pk_build PRIMARY KEY (candidate_id), 
	CONSTRAINT fk_build_binary_sha_artefact FOREIGN KEY(binary_sha) REFERENCES artefact (sha256), 
	CONSTRAINT fk_build_candidate_id_candidate FOREIGN KEY(candidate_id) REFERENCES candidate (id)
);
INSERT INTO "build" VALUES(4294967296,'sm_89','nvrtc 13.0','ok',0.125,1,'2 warnings','ptxas info : Used 40 registers','b20389ce6e88582c86332b8430c38903bd6fa75fa3fbb7a8d630de1dbd322874',40,8,1024,49152,16,0.75,'b17d972588cad9aeaa7e3ff710ec8007f8b42f128519dfe102223b890e3c4798','b17d972588cad9aeaa7e3ff710ec8007f8b42f128519dfe102223b890e3c4798');
INSERT INTO "build" VALUES(4294967297,'sm_89','nvrtc 13.0','ok',1.125,1,'2 warnings','ptxas info : Used 40 registers','dad95b8243ef4c8d02fa743b2b24b3b29a9439137ff5eaf4d9f93a58d1571322',40,8,1024,49152,16,0.75,'ce34394dab2ea6e5a6e99995a85b78072bd2163dc283b75206ffdd32ada948b2','ce34394dab2ea6e5a6e99995a85b78072bd2163dc283b75206ffdd32ada948b2');
INSERT INTO "build" VALUES(4294967298,'sm_89','nvrtc 13.0','ok',2.125,1,'2 warnings','ptxas info : Used 40 registers','92278656227c1078a0bb492299729f7361524c11d407a1d3b7071c0ea8d93f3a',40,8,1024,49152,16,0.75,'fd79d55021ba951fda975d3ff212cebc02c4a5a74404648631f84c6e276bd3ff','fd79d55021ba951fda975d3ff212cebc02c4a5a74404648631f84c6e276bd3ff');
INSERT INTO "build" VALUES(4294967299,'sm_89','nvrtc 13.0','ok',3.125,1,'2 warnings','ptxas info : Used 40 registers','0c6b861e4f1169ae0910995b9893e68d618df4b95f978a67ec832400247febc9',40,8,1024,49152,16,0.75,'0cef087d7eb8963b2fc0bcedbb6f7c9a63fefeb4741304339f2d0a355bda836e','0cef087d7eb8963b2fc0bcedbb6f7c9a63fefeb4741304339f2d0a355bda836e');
INSERT INTO "build" VALUES(4294967300,'sm_89','nvrtc 13.0','ok',4.125,1,'2 warnings','ptxas info : Used 40 registers','0ad8d7f99c83131a7808fb8368b6c10c0c6f60ec4015a5473429d88961345e6b',40,8,1024,49152,16,0.75,'4bc7cd8a7434223b0e2054c154a88f224c069f2c1757bb573fa7d3e981c0320a','4bc7cd8a7434223b0e2054c154a88f224c069f2c1757bb573fa7d3e981c0320a');
INSERT INTO "build" VALUES(4294967301,'sm_89','nvrtc 13.0','compile_error',0.5,0,'candidate.cu(1): note
candidate.cu(1): error: identifier "this" is undefined',NULL,'e3588c84042c8cc9b86ca7017551bf413a63ff1cac87fe573a6ad2b745cf847c',NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "build" VALUES(4294967303,'sm_89','nvrtc 13.0','ok',7.125,1,'2 warnings','ptxas info : Used 40 registers','04581ea40ae0ac836f5692b2072c59aafb47f1c46757ca69593a6d8bafb4b2ba',40,8,1024,49152,16,0.75,'1e99518f9c23a111f998d43233449cb5c440cc01c44aeaab6fd41ec2214737b9','1e99518f9c23a111f998d43233449cb5c440cc01c44aeaab6fd41ec2214737b9');
INSERT INTO "build" VALUES(8589934592,'sm_89','nvrtc 13.0','ok',0.125,1,'2 warnings','ptxas info : Used 40 registers','b20389ce6e88582c86332b8430c38903bd6fa75fa3fbb7a8d630de1dbd322874',40,8,1024,49152,16,0.75,'b17d972588cad9aeaa7e3ff710ec8007f8b42f128519dfe102223b890e3c4798','b17d972588cad9aeaa7e3ff710ec8007f8b42f128519dfe102223b890e3c4798');
CREATE TABLE candidate (
	id INTEGER NOT NULL, 
	run_id BIGINT NOT NULL, 
	"order" BIGINT NOT NULL, 
	island INTEGER NOT NULL, 
	public_id VARCHAR(16) NOT NULL, 
	genome TEXT NOT NULL, 
	genome_digest VARCHAR(64) NOT NULL, 
	source_sha VARCHAR(64), 
	operator TEXT NOT NULL, 
	status TEXT NOT NULL, 
	score DOUBLE, 
	log TEXT NOT NULL, 
	same_code_as_id INTEGER, 
	seconds DOUBLE NOT NULL, 
	gate_seconds DOUBLE NOT NULL, 
	timing_seconds DOUBLE NOT NULL, 
	elapsed_s DOUBLE NOT NULL, 
	created DATETIME NOT NULL, 
	CONSTRAINT pk_candidate PRIMARY KEY (id), 
	CONSTRAINT ck_candidate_key CHECK (id = run_id * 4294967296 + "order"), 
	CONSTRAINT fk_candidate_run_id_island_island FOREIGN KEY(run_id, island) REFERENCES island (run_id, number), 
	CONSTRAINT fk_candidate_same_code_as_id_candidate FOREIGN KEY(same_code_as_id) REFERENCES candidate (id), 
	CONSTRAINT fk_candidate_source_sha_artefact FOREIGN KEY(source_sha) REFERENCES artefact (sha256), 
	CONSTRAINT uq_candidate_public_id UNIQUE (public_id)
);
INSERT INTO "candidate" VALUES(4294967296,1,0,0,'762693478be73d70','{"parameters":{"fast":true,"path":"registers","threads":0,"vector":4}}','b89a90e669b367f11549e4523f9f09a481a53abb8977d33a32d092b90e00de04','13ab25c23ccb09ddf7b9492f8971a2c8f141eac329e73732ccdda844a484fac5','random','ok',0.9,'fine',NULL,1.5,0.5,0.75,1.0,'2026-11-21 23:53:58.394626');
INSERT INTO "candidate" VALUES(4294967297,1,1,0,'0fc27ca3f51ad097','{"parameters":{"fast":true,"path":"registers","threads":1,"vector":4}}','9cf975f484335371cfd2e1d60ed669e248a3542fef7ec2011e11a42006a03131','9bde986e88aeadbca950d4c482582392dc993bf6d1b86d7da30cef18f71f6642','mutation','ok',0.7,'fine',NULL,1.5,0.5,0.75,2.0,'2026-11-21 23:53:58.397962');
INSERT INTO "candidate" VALUES(4294967298,1,2,0,'6d60dc250cca8d4d','{"parameters":{"fast":true,"path":"registers","threads":2,"vector":4}}','0f6df2f4edf406249c4f6e0c632fb8abb5c758e227e84634c2a2bab8bbfa8c14','e28c65eba38acfd1481950e5f9798d83d8a21bcce6100eb09fee8c50ed3556c7','crossover','ok',0.5,'fine',NULL,1.5,0.5,0.75,3.0,'2026-11-21 23:53:58.399688');
INSERT INTO "candidate" VALUES(4294967299,1,3,0,'ce89c4aaaf52ce9e','{"parameters":{"fast":true,"path":"registers","threads":3,"vector":4}}','7b8a80af2b20796d923b99d890b768dcd8cc6d7cb3b1360e0b78d2f3ab94ceae','d0e6250a0613e48499008a02e5eeef141f4b0f426f2925c35bd51bcd70a7681f','mutation','same_code',0.5,'fine',4294967298,1.5,0.5,0.75,4.0,'2026-11-21 23:53:58.400925');
INSERT INTO "candidate" VALUES(4294967300,1,4,0,'245a3d99c6a2c7d7','{"parameters":{"fast":true,"path":"registers","threads":4,"vector":4}}','6d045818bdba5a5f3da436d79696073ce6232fc70d3b9d52cff2eab2c12feac7','2fbcbbc64a93e289d552d1b9842f01f53047a26f168f28c47d890993345913ef','mutation','wrong',NULL,'',NULL,0.25,0.2,0.0,5.0,'2026-11-21 23:53:58.402157');
INSERT INTO "candidate" VALUES(4294967301,1,5,0,'204d64e9aa901928','{"parameters":{"fast":true,"path":"registers","threads":5,"vector":4}}','2f5b91bd52fc5e21366a84c9ef216a93912e50a7b8e0c6e946611e6c05745464','e5f69173541a6dbc86c82f0943b9185d0fb62a0953819fbc2f67ceb1940d93dd','mutation','compile_error',NULL,'',NULL,0.0,0.0,0.0,6.0,'2026-11-21 23:53:58.403363');
INSERT INTO "candidate" VALUES(4294967302,1,6,0,'31298a0b0d6666b6','{"parameters":{"fast":true,"path":"registers","threads":6,"vector":4}}','85433ad0bb11c1c2334bcecde7ed717deceae200c30349070f867f2448fe3a76',NULL,'mutation','timeout',NULL,'
timeout: it is gone
and more',NULL,30.0,0.0,0.0,7.0,'2026-11-21 23:53:58.404320');
INSERT INTO "candidate" VALUES(4294967303,1,7,1,'b335aabeb913ffc5','{"parameters":{"fast":true,"path":"registers","threads":7,"vector":4}}','ad5910021cf556439d43c8ea03b1e7fcd10d39e8e3b9f60a87eab90bdf4a04b3','87c56638054cb0dfc0052c55a5a787a4aa5ec6b0fffb8c888bb9d7cee3bc0535','mutation','ok',0.8,'fine',NULL,1.5,0.5,0.75,8.0,'2026-11-21 23:53:58.404753');
INSERT INTO "candidate" VALUES(8589934592,2,0,0,'8a398a3ae3b168f7','{"parameters":{"fast":true,"path":"registers","threads":0,"vector":4}}','b89a90e669b367f11549e4523f9f09a481a53abb8977d33a32d092b90e00de04','13ab25c23ccb09ddf7b9492f8971a2c8f141eac329e73732ccdda844a484fac5','mutation','ok',0.6,'fine',NULL,1.5,0.5,0.75,1.0,'2026-11-21 23:53:58.412443');
CREATE TABLE "check" (
	candidate_id INTEGER NOT NULL, 
	round INTEGER NOT NULL, 
	position INTEGER NOT NULL, 
	stage TEXT NOT NULL, 
	"case" TEXT NOT NULL, 
	passed BOOLEAN NOT NULL, 
	error DOUBLE, 
	allowed DOUBLE, 
	torch_error DOUBLE, 
	reason TEXT NOT NULL, 
	seed BIGINT NOT NULL, 
	CONSTRAINT pk_check PRIMARY KEY (candidate_id, round, position), 
	CONSTRAINT ck_check_stage CHECK (stage IN ('search', 'final')), 
	CONSTRAINT fk_check_candidate_id_candidate FOREIGN KEY(candidate_id) REFERENCES candidate (id)
)
 WITHOUT ROWID

;
INSERT INTO "check" VALUES(4294967296,0,0,'search','normal',1,1.0e-07,1.0e-05,2.0e-07,'close',3);
INSERT INTO "check" VALUES(4294967296,0,1,'search','large',1,0.0,0.001,0.0001,'exact',1099511627776);
INSERT INTO "check" VALUES(4294967297,0,0,'search','normal',1,1.0e-07,1.0e-05,2.0e-07,'close',3);
INSERT INTO "check" VALUES(4294967297,0,1,'search','large',1,0.0,0.001,0.0001,'exact',1099511627776);
INSERT INTO "check" VALUES(4294967297,1,0,'final','constant rows',0,9e999,1.0e-05,1.0e-07,'Infinity where the reference is 0',1);
INSERT INTO "check" VALUES(4294967298,0,0,'search','normal',1,1.0e-07,1.0e-05,2.0e-07,'close',3);
INSERT INTO "check" VALUES(4294967298,0,1,'search','large',1,0.0,0.001,0.0001,'exact',1099511627776);
INSERT INTO "check" VALUES(4294967298,1,0,'final','normal',1,1.0e-07,1.0e-05,2.0e-07,'close',3);
INSERT INTO "check" VALUES(4294967298,1,1,'final','large',1,0.0,0.001,0.0001,'exact',1099511627776);
INSERT INTO "check" VALUES(4294967299,0,0,'search','normal',1,1.0e-07,1.0e-05,2.0e-07,'close',3);
INSERT INTO "check" VALUES(4294967299,0,1,'search','large',1,0.0,0.001,0.0001,'exact',1099511627776);
INSERT INTO "check" VALUES(4294967300,0,0,'search','constant rows',0,9e999,1.0e-05,1.0e-07,'Infinity where the reference is 0',1);
INSERT INTO "check" VALUES(4294967303,0,0,'search','normal',1,1.0e-07,1.0e-05,2.0e-07,'close',3);
INSERT INTO "check" VALUES(4294967303,0,1,'search','large',1,0.0,0.001,0.0001,'exact',1099511627776);
INSERT INTO "check" VALUES(8589934592,0,0,'search','normal',1,1.0e-07,1.0e-05,2.0e-07,'close',3);
INSERT INTO "check" VALUES(8589934592,0,1,'search','large',1,0.0,0.001,0.0001,'exact',1099511627776);
CREATE TABLE environment (
	id INTEGER NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	device TEXT NOT NULL, 
	arch TEXT NOT NULL, 
	driver TEXT NOT NULL, 
	cuda TEXT NOT NULL, 
	nvrtc TEXT NOT NULL, 
	compiler TEXT NOT NULL, 
	torch TEXT NOT NULL, 
	python TEXT NOT NULL, 
	evo TEXT NOT NULL, 
	details JSON NOT NULL, 
	CONSTRAINT pk_environment PRIMARY KEY (id), 
	CONSTRAINT uq_environment_digest UNIQUE (digest)
);
INSERT INTO "environment" VALUES(1,'23b788367db818928e9cdc3aeebaae9df44051cbac78bcc0e9863425ecc56aff','NVIDIA L4','sm_89','580.1','13.0','13.0.48','nvrtc 13.0','2.13.0','3.11.7','0.1.0','{"sm_clock_mhz":2040,"ecc":true}');
CREATE TABLE final (
	candidate_id INTEGER NOT NULL, 
	round INTEGER NOT NULL, 
	status TEXT NOT NULL, 
	log TEXT NOT NULL, 
	seconds DOUBLE NOT NULL, 
	gate_seconds DOUBLE NOT NULL, 
	timing_seconds DOUBLE NOT NULL, 
	created DATETIME NOT NULL, 
	CONSTRAINT pk_final PRIMARY KEY (candidate_id, round), 
	CONSTRAINT fk_final_candidate_id_candidate FOREIGN KEY(candidate_id) REFERENCES candidate (id)
);
INSERT INTO "final" VALUES(4294967298,1,'ok','raced',4.0,1.0,3.0,'2026-11-21 23:53:58.407333');
INSERT INTO "final" VALUES(4294967297,1,'wrong','not so right',1.0,0.0,0.0,'2026-11-21 23:53:58.409128');
CREATE TABLE "island" (
	run_id INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	workload TEXT NOT NULL, 
	dims JSON NOT NULL, 
	dtype TEXT NOT NULL, 
	options JSON NOT NULL, 
	winner_id INTEGER, 
	CONSTRAINT pk_island PRIMARY KEY (run_id, number), 
	CONSTRAINT fk_island_run_id_run FOREIGN KEY(run_id) REFERENCES run (id), 
	CONSTRAINT fk_island_winner_id_candidate FOREIGN KEY(winner_id) REFERENCES candidate (id)
);
INSERT INTO "island" VALUES(1,0,'rows=1024,cols=512,dtype=float32,eps=1e-05,weight=true','{"rows":1024,"cols":512}','float32','{"eps":1e-05,"weight":true}',4294967298);
INSERT INTO "island" VALUES(1,1,'rows=4096,cols=8192,dtype=float16,eps=1e-06,weight=false','{"rows":4096,"cols":8192}','float16','{"eps":1e-06,"weight":false}',NULL);
INSERT INTO "island" VALUES(2,0,'rows=1024,cols=512,dtype=float32,eps=1e-05,weight=true','{"rows":1024,"cols":512}','float32','{"eps":1e-05,"weight":true}',NULL);
INSERT INTO "island" VALUES(2,1,'rows=4096,cols=8192,dtype=float16,eps=1e-06,weight=false','{"rows":4096,"cols":8192}','float16','{"eps":1e-06,"weight":false}',NULL);
CREATE TABLE parentage (
	child_id INTEGER NOT NULL, 
	position INTEGER NOT NULL, 
	parent_id INTEGER NOT NULL, 
	role TEXT NOT NULL, 
	CONSTRAINT pk_parentage PRIMARY KEY (child_id, position), 
	CONSTRAINT fk_parentage_child_id_candidate FOREIGN KEY(child_id) REFERENCES candidate (id), 
	CONSTRAINT fk_parentage_parent_id_candidate FOREIGN KEY(parent_id) REFERENCES candidate (id)
)
 WITHOUT ROWID

;
INSERT INTO "parentage" VALUES(4294967297,0,4294967296,'parent');
INSERT INTO "parentage" VALUES(4294967298,0,4294967296,'parent');
INSERT INTO "parentage" VALUES(4294967298,1,4294967297,'mate');
INSERT INTO "parentage" VALUES(4294967299,0,4294967298,'parent');
INSERT INTO "parentage" VALUES(4294967300,0,4294967298,'parent');
INSERT INTO "parentage" VALUES(4294967301,0,4294967298,'parent');
INSERT INTO "parentage" VALUES(4294967302,0,4294967298,'parent');
CREATE TABLE run (
	id INTEGER NOT NULL, 
	uid TEXT NOT NULL, 
	name TEXT NOT NULL, 
	kernel TEXT NOT NULL, 
	kernel_digest VARCHAR(64) NOT NULL, 
	target TEXT NOT NULL, 
	arch TEXT NOT NULL, 
	sampler TEXT NOT NULL, 
	seed BIGINT NOT NULL, 
	window INTEGER NOT NULL, 
	options JSON NOT NULL, 
	budget JSON NOT NULL, 
	status TEXT NOT NULL, 
	stop_reason TEXT NOT NULL, 
	created DATETIME NOT NULL, 
	updated DATETIME NOT NULL, 
	finished DATETIME, 
	elapsed_s DOUBLE NOT NULL, 
	environment_id INTEGER NOT NULL, 
	CONSTRAINT pk_run PRIMARY KEY (id), 
	CONSTRAINT ck_run_status CHECK (status IN ('running', 'interrupted', 'finished', 'failed')), 
	CONSTRAINT fk_run_environment_id_environment FOREIGN KEY(environment_id) REFERENCES environment (id), 
	CONSTRAINT uq_run_name UNIQUE (name), 
	CONSTRAINT uq_run_uid UNIQUE (uid)
);
INSERT INTO "run" VALUES(1,'a34e33e0119b9e15','old','layernorm','b1d23cb647a0f6f9f39bcf080f8e4cd10f46286bc7cad999b3c4dfeb13eb2629','cuda','sm_89','evolution',-7,16,'{"sampler":{"population":24},"fixed":{"vector":4}}','{"seconds":600.0,"evaluations":null}','finished','600 s are over','2026-11-21 23:53:58.388412','2026-11-21 23:53:58.410311','2026-11-21 23:53:58.410246',10.0,1);
INSERT INTO "run" VALUES(2,'aba1fc135a60fdca','cut-off','layernorm','b1d23cb647a0f6f9f39bcf080f8e4cd10f46286bc7cad999b3c4dfeb13eb2629','cuda','sm_89','evolution',-7,16,'{"sampler":{"population":24},"fixed":{"vector":4}}','{"seconds":600.0,"evaluations":null}','interrupted','interrupted','2026-11-21 23:53:58.411031','2026-11-21 23:53:58.413229',NULL,1.0,1);
CREATE TABLE timing (
	id INTEGER NOT NULL, 
	run_id INTEGER NOT NULL, 
	island INTEGER NOT NULL, 
	candidate_id INTEGER, 
	round INTEGER NOT NULL, 
	stage TEXT NOT NULL, 
	contender TEXT NOT NULL, 
	workload TEXT NOT NULL, 
	protocol TEXT NOT NULL, 
	median_us DOUBLE NOT NULL, 
	low_us DOUBLE NOT NULL, 
	high_us DOUBLE NOT NULL, 
	ratio DOUBLE, 
	ratio_low DOUBLE, 
	ratio_high DOUBLE, 
	calls_per_sample INTEGER NOT NULL, 
	sets INTEGER NOT NULL, 
	samples_us JSON NOT NULL, 
	clocks JSON NOT NULL, 
	CONSTRAINT pk_timing PRIMARY KEY (id), 
	CONSTRAINT ck_timing_stage CHECK (stage IN ('search', 'final')), 
	CONSTRAINT fk_timing_candidate_id_candidate FOREIGN KEY(candidate_id) REFERENCES candidate (id), 
	CONSTRAINT fk_timing_run_id_island_island FOREIGN KEY(run_id, island) REFERENCES island (run_id, number)
);
INSERT INTO "timing" VALUES(1,1,0,NULL,0,'search','torch','rows=1024,cols=512,dtype=float32,eps=1e-05,weight=true','cold',20.1,19.9,20.3,1.0,0.99,1.01,12,3,'[20.1,0.30000000000000004,1e-17]','{"sm_mhz":1980.0,"power_w":61.25}');
INSERT INTO "timing" VALUES(2,1,0,4294967296,0,'search','candidate','rows=1024,cols=512,dtype=float32,eps=1e-05,weight=true','cold',1.80900000000000034106e+01,17.91,18.27,0.9,0.89,0.91,12,3,'[18.090000000000003,0.30000000000000004,1e-17]','{"sm_mhz":1980.0,"power_w":61.25}');
INSERT INTO "timing" VALUES(3,1,0,4294967296,0,'search','torch','rows=1024,cols=512,dtype=float32,eps=1e-05,weight=true','cold',20.1,19.9,20.3,1.0,0.99,1.01,12,3,'[20.1,0.30000000000000004,1e-17]','{"sm_mhz":1980.0,"power_w":61.25}');
INSERT INTO "timing" VALUES(4,1,0,4294967297,0,'search','candidate','rows=1024,cols=512,dtype=float32,eps=1e-05,weight=true','cold',14.07,1.39299999999999979394e+01,1.42099999999999990762e+01,0.7,0.69,0.71,12,3,'[14.07,0.30000000000000004,1e-17]','{"sm_mhz":1980.0,"power_w":61.25}');
INSERT INTO "timing" VALUES(5,1,0,4294967297,0,'search','torch','rows=1024,cols=512,dtype=float32,eps=1e-05,weight=true','cold',20.1,19.9,20.3,1.0,0.99,1.01,12,3,'[20.1,0.30000000000000004,1e-17]','{"sm_mhz":1980.0,"power_w":61.25}');
INSERT INTO "timing" VALUES(6,1,0,4294967298,0,'search','candidate','rows=1024,cols=512,dtype=float32,eps=1e-05,weight=true','cold',10.05,9.95,10.15,0.5,0.49,0.51,12,3,'[10.05,0.30000000000000004,1e-17]','{"sm_mhz":1980.0,"power_w":61.25}');
INSERT INTO "timing" VALUES(7,1,0,4294967298,0,'search','torch','rows=1024,cols=512,dtype=float32,eps=1e-05,weight=true','cold',20.1,19.9,20.3,1.0,0.99,1.01,12,3,'[20.1,0.30000000000000004,1e-17]','{"sm_mhz":1980.0,"power_w":61.25}');
INSERT INTO "timing" VALUES(8,1,0,4294967299,0,'search','candidate','rows=1024,cols=512,dtype=float32,eps=1e-05,weight=true','cold',10.05,9.95,10.15,0.5,0.49,0.51,12,3,'[10.05,0.30000000000000004,1e-17]','{"sm_mhz":1980.0,"power_w":61.25}');
INSERT INTO "timing" VALUES(9,1,0,4294967299,0,'search','torch','rows=1024,cols=512,dtype=float32,eps=1e-05,weight=true','cold',20.1,19.9,20.3,1.0,0.99,1.01,12,3,'[20.1,0.30000000000000004,1e-17]','{"sm_mhz":1980.0,"power_w":61.25}');
INSERT INTO "timing" VALUES(10,1,1,4294967303,0,'search','candidate','rows=4096,cols=8192,dtype=float16,eps=1e-06,weight=false','cold',1.60800000000000018474e+01,15.92,1.62400000000000019895e+01,0.8,0.79,0.81,12,3,'[16.080000000000002,0.30000000000000004,1e-17]','{"sm_mhz":1980.0,"power_w":61.25}');
INSERT INTO "timing" VALUES(11,1,1,4294967303,0,'search','torch','rows=4096,cols=8192,dtype=float16,eps=1e-06,weight=false','cold',20.1,19.9,20.3,1.0,0.99,1.01,12,3,'[20.1,0.30000000000000004,1e-17]','{"sm_mhz":1980.0,"power_w":61.25}');
INSERT INTO "timing" VALUES(12,1,0,4294967298,1,'final','candidate','rows=1024,cols=512,dtype=float32,eps=1e-05,weight=true','final',1.10550000000000014921e+01,10.945,1.11650000000000009241e+01,0.55,0.54,0.56,12,3,'[11.055000000000001,0.30000000000000004,1e-17]','{"sm_mhz":1980.0,"power_w":61.25}');
INSERT INTO "timing" VALUES(13,2,0,8589934592,0,'search','candidate','rows=1024,cols=512,dtype=float32,eps=1e-05,weight=true','cold',12.06,11.94,12.18,0.6,0.59,0.61,12,3,'[12.06,0.30000000000000004,1e-17]','{"sm_mhz":1980.0,"power_w":61.25}');
INSERT INTO "timing" VALUES(14,2,0,8589934592,0,'search','torch','rows=1024,cols=512,dtype=float32,eps=1e-05,weight=true','cold',20.1,19.9,20.3,1.0,0.99,1.01,12,3,'[20.1,0.30000000000000004,1e-17]','{"sm_mhz":1980.0,"power_w":61.25}');
CREATE INDEX ix_run_kernel ON run (kernel);
CREATE INDEX ix_candidate_run_id_status ON candidate (run_id, status);
CREATE INDEX ix_candidate_run_id_island_score ON candidate (run_id, island, score);
CREATE INDEX ix_parentage_parent_id ON parentage (parent_id);
CREATE INDEX ix_island_workload ON island (workload);
CREATE INDEX ix_timing_run_id_candidate_id ON timing (run_id, candidate_id);
COMMIT;
